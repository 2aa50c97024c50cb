"""What the five recipes share: the budget flag, a folder for a run, a progress bar, pictures and measurements."""
