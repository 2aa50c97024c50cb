"""Judges sameness: a fitted step against the plain one, from the same state.

verifying.py is memfit.verify: comparing.py gives the verdict on a plan's levers, or on those beside others that were asked for, in the
words of notes.py. reference.py runs the plain step in several ways, each rolled back: as it is, again, with the noise of rounding
(noise.py), in float64 with the same random draws (draws.py, dispatch modes). fitted.py runs it with levers on. observing.py writes a
run down on a shelf.py (a file; one tensor at a time is in memory; where the plain step does not fit, what autograd keeps of it waits in
one, too: kept_in_file.py), by names found on the plain step (places.py). rules.py has one rule a class of exactness, rounding.py what
is off by rounding alone, checks.py one comparison, culprit.py finds the lever to blame by leaving levers out, separable.py says what
about a loss cannot be divided. limit.py, needs.py and fitting_sample.py say how much of the batch there is room for, room.py
what runs where there is none for the plain step, fewer_parts.py makes parts of it smaller with it. docs/proof.md has the bounds.
"""

from __future__ import annotations

from memfit.proof.verifying import prove, require, verify

__all__ = ["prove", "require", "verify"]
