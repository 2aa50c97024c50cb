"""The documented lines: banner, a line a step, a line an epoch, the final table, memory statistics. MB are 10^6 bytes."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence

from recipes.cifar10.data import TEST_BATCH, Images
from recipes.cifar10.training import SoFar, Tell, Watch
from recipes.kit.progress import tree_bytes

MB = 1e6
LINE = "=" * 80
TITLES = {"h2q": "H2Q-Spacetime", "baseline": "Baseline-CNN"}


def banner(device: str, batch: int, steps: int, epochs: int, initial: int) -> None:
    """What is going to be done."""
    print(f"{LINE}\nH2Q CIFAR-10 Classification Benchmark (Memory Optimized)\n{LINE}\nDevice: {device}\nBatch size: {batch}")
    print(f"Gradient accumulation steps: {steps}\nEffective batch size: {batch * steps}\nEpochs: {epochs}\n{LINE}")
    print(f"Initial memory: {initial / MB:.1f}MB\n\nLoading CIFAR-10 dataset...")


def loaded(images: Images, batches: int) -> None:
    """What there is to train on; a line of our own says where it comes from."""
    print(f"Data: {images.origin}\nTrain batches: {batches}, Test batches: {-(-len(images.test) // TEST_BATCH)}")


def model_begins(name: str, parameters: int, device: str, batch: int, steps: int, done: int) -> None:
    """A model's own banner."""
    print(f"\n{LINE}\nBenchmarking: {TITLES[name]} (Memory Optimized)\nParameters: {parameters:,}\nDevice: {device}")
    print(f"Batch size: {batch} × Accumulation: {steps} = Effective {batch * steps}\n{LINE}")
    if done:
        print(f"Resumed after epoch {done}")


def teller(batches: int, every: int, watch: Watch) -> Tell:
    """The documented line, written over itself until the last one, which stays."""
    last = batches // every * every or batches

    def tell(number: int, loss: float) -> None:
        if number % every == 0 or number == last:
            end = "\n" if number == last else "\r"
            print(f"  Step {number}/{batches} | Loss: {loss:.4f} | Mem: {watch.look() / MB:.1f}MB", end=end, flush=True)

    return tell


def epoch_ends(loss: float, accuracy: float, test_loss: float, watch: Watch) -> None:
    """The epoch's line. Its memory is the most the process tree held, not what it holds between two steps."""
    memory = f"{watch.memory_bytes / MB:.1f}MB"
    print(f"  Train Loss: {loss:.4f} | Test Acc: {accuracy:.2%} | Test Loss: {test_loss:.4f} | Memory: {memory}")
    if warning := swap_warning(watch.swapped_bytes):
        print(warning)


def swap_warning(swapped: int) -> str:
    """What to say about an epoch in which so many bytes were swapped; nothing, if they are few."""
    if swapped < MB:
        return ""
    return (
        f"  Warning: this machine swaps. {swapped / MB:.1f}MB went to its disk or came back from it in this epoch, and training waits for "
        "them: close other programs, or give --budget less than what is free."
    )


def results(rows: Sequence[tuple[str, int, SoFar]], initial: int, swapped: int) -> None:
    """The final table: a model's name, its parameters and its training; then the memory statistics."""
    print(f"\n{LINE}\nCIFAR-10 BENCHMARK RESULTS (Memory Optimized)\n{LINE}")
    print(f"{'Model':<20} {'Accuracy':<12} {'Params':<12} {'Time(s)':<12} {'Memory(MB)':<15}\n{'-' * 80}")
    for name, parameters, it in rows:
        accuracy, count = f"{it.accuracy:.2%}", f"{parameters:,}"
        print(f"{TITLES[name]:<20} {accuracy:<12} {count:<12} {it.seconds:<12.1f} {it.memory_bytes / MB:.1f}")
    current, peak = tracemalloc.get_traced_memory()
    print(f"{LINE}\n\nMemory Statistics:\n  Initial: {initial / MB:.1f}MB\n  Current: {current / MB:.1f}MB (Python objects)")
    print(f"  Peak: {peak / MB:.1f}MB (Python objects)\n  Final system: {tree_bytes() / MB:.1f}MB")
    print(f"  Swapped: {swapped / MB:.1f}MB (whole machine)")
