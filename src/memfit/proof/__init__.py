"""Judges sameness: a fitted step against the plain one, from the same state."""

from __future__ import annotations

from memfit.proof.verifying import prove, require, verify

__all__ = ["prove", "require", "verify"]
