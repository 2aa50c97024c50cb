"""What a table does, in one sentence that fits the step."""

from __future__ import annotations

from memfit.levers.saved.table import BITS, CACHE, DISK, DROP, HOST, RECOMPUTE
from memfit.levers.saved.words import words_of
from memfit.records import Op, Process, Storage, Trace

KIB = 1 << 10
NAMES = ("mm", "gelu", "bernoulli_", "gelu", "convolution")


def trace() -> Trace:
    """Each op makes a result of so many KiB: 1, 2, 3, 4, 5."""
    ops = tuple(Op(f"aten.{name}.default", "forward", "", "", "", (), (n,)) for n, name in enumerate(NAMES))
    storages = tuple(Storage((n + 1) * KIB, n, None) for n in range(len(NAMES)))
    return Trace(ops, storages, (), (), (), Process(0), True, "cpu", 1)


def test_each_way_has_its_bytes_and_what_is_made_again_most_its_name() -> None:
    assert words_of(trace(), {0: RECOMPUTE, 1: CACHE, 3: CACHE, 2: BITS, 4: DISK}) == (
        "until backward needs it: 7.00 KiB made again (most of it by gelu), 5.00 KiB in a file, 3.00 KiB packed into bits"
    )
    assert words_of(trace(), {1: CACHE, 3: RECOMPUTE}) == "until backward needs it: 6.00 KiB made again (all of it by gelu)"
    assert words_of(trace(), {0: HOST}) == "until backward needs it: 1.00 KiB in the host's memory"


def test_what_is_dropped_is_told_apart() -> None:
    dropped = "inputs of frozen convolutions (1), which nobody reads, are dropped"
    assert words_of(trace(), {4: DROP}) == dropped
    assert words_of(trace(), {0: DISK, 4: DROP}) == f"until backward needs it: 1.00 KiB in a file; {dropped}"
