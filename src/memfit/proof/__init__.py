"""Judges sameness: a fitted step against the plain one, from the same state."""
