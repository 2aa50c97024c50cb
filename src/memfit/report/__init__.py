"""One view of each record, rows and words chosen once, and the ways to show it. Never runs a step; needs no torch."""
