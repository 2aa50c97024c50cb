"""Memory whose bits wait in a file, not in memory again, until they are put back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import IO

import torch

from memfit.disk_file import file_on_a_disk

_PIECE = 2**20  # bytes that are looked at in one go


@contextmanager
def bits_restored(storages: Iterable[torch.UntypedStorage]) -> Iterator[None]:
    """Whatever is written to these inside is as it was afterwards. What is as it was is only read: it may be a file of the user's.

    >>> numbers = torch.ones(3)
    >>> with bits_restored([numbers.untyped_storage()]):
    ...     numbers.mul_(2)
    tensor([2., 2., 2.])
    >>> numbers
    tensor([1., 1., 1.])
    """
    kept = [(storage, storage.nbytes()) for storage in {storage.data_ptr(): storage for storage in storages}.values()]
    with file_on_a_disk() as file:
        for storage, _ in kept:
            for piece in _pieces(storage):
                file.write(piece.to("cpu", copy=True).numpy().data)  # a storage that numpy has seen is never resized again
        file.flush()  # a full disk is found before anything is changed
        try:
            yield
        finally:
            file.seek(0)
            for storage, size in kept:
                _put_back(storage, size, file)


def _put_back(storage: torch.UntypedStorage, size: int, file: IO[bytes]) -> None:
    if storage.nbytes() != size:
        storage.resize_(size)
    for piece in _pieces(storage):
        before = torch.frombuffer(bytearray(file.read(len(piece))), dtype=torch.uint8)
        if not torch.equal(piece.cpu(), before):
            piece.copy_(before)


def _pieces(storage: torch.UntypedStorage) -> tuple[torch.Tensor, ...]:
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return whole.split(_PIECE) if len(whole) else ()
