"""Chooses: from a ledger and a budget to the fastest plan that fits. Pure, and imports no torch itself.

1. combining.py enumerates the levers that change the step as a whole, each rewritten into a ledger. Attention, outer products and half
   precision bring other operators: they are captured instead (fitting/captured_lever.py), so that a table on top of them names what is
   there and knows its cost.
2. proposing.py looks at each combination, the fastest first, leaves out what cannot be faster than what was found, and spends the time
   that is left on those that promise most.
3. For each, search.py looks for the fastest table of saved tensors under a peak, unless even the floor (nothing in memory that nobody
   reads) is above it: greedily first; then programme.py (HiGHS) proposes, evaluation.py follows the schedule exactly, the differences
   become limits of the next proposal (inquiry.py); before and after, single decisions are changed while that helps, and with time left,
   pairs of them. Where there are few tables, every_table.py tries them all instead.
4. fitting/planning.py applies the fastest proposal to simulated tensors and captures it. What does not fit then is never shown, and what it
   showed of peak and heap counts for the next proposals (learning.py). Where nothing fits after several, less and less is asked for, and
   in the end the lowest there is; if that does not fit either, impossible.py says what fills it and what would help.
5. The plan tells how far it may be from the best. programme.py learns from what it got wrong, so what it proves is no bound; bound.py
   solves another one, which knows less than a step does and so never asks for more than the best table takes. comparing.py takes the
   lowest of these over all combinations that could be faster (Plan.gap), and says of those that were skipped why; reaching.py what each
   class of exactness could reach.

Costs are seconds:

- Each distinct operator call is timed once on this machine, the dearest first, for a few seconds at most, in a process of its own
  (capture/op_times.py, capture/clock.py), and remembered like workspaces; calls that are too large or too long are timed on less.
- What micro-batches cost beside the whole batch comes from the heaviest calls at both sizes (capture/part_times.py), what the mechanism
  itself costs in Python from watching.py.
- What is left is estimated from flops and bytes with speeds measured in a moment (capture/speeds.py), in the measure of timed calls of
  the same operator; everything for another device with speeds typical of it. Plan.times says which it was.
"""
