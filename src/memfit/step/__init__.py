"""What the user hands over, and how it runs: as it is, or with what levers put around and between its calls."""

from memfit.step.step import Batch, Loss, Phase, Scheduler, Step, Watcher, device_of, parameters_of

__all__ = ["Batch", "Loss", "Phase", "Scheduler", "Step", "Watcher", "device_of", "parameters_of"]
