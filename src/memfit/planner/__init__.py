"""Chooses: from a ledger and a budget to the fastest plan that fits. Pure, and imports no torch itself."""
