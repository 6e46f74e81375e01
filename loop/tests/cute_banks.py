"""Counts, in the emulation of `cute_cpu`, how often accesses of a warp to shared memory meet a bank."""

from collections.abc import Callable
from unittest import mock

import numpy as np

from loop.tests import cute_cpu

# what is counted by name: the bytes of an access a lane, from the arguments behind the address
SIZES: dict[str, Callable] = {
    "lds": lambda n, dtype: 4 * n, "sts_frag": lambda x: 16, "copy": lambda source, n, *rest, **more: n,
}  # fmt: skip
MATRICES = {"ldmatrix_n": lambda n, transposed: n, "put_turned": len, "put_rows": len}  # how many of 8 rows of 16 bytes


def most(run: Callable[[], object], names: tuple[str, ...]) -> list[int]:
    """What `run` does: for each access of those names, and lanes that are served together, the most words of one bank.
    """
    met = []

    def note(address, size):
        address = np.broadcast_to(address, (cute_cpu.THREADS,)).astype(np.int64).reshape(-1, min(128 // size, 32))
        for group in address[..., None] // 4 + np.arange(size // 4):
            words = np.unique(group)
            met.append(np.bincount(words % 32).max())

    def counted(name):
        ordinary = getattr(cute_cpu.Ptx, name)

        def method(self, address, *rest, **more):
            if name in SIZES:
                note(address, SIZES[name](*rest, **more))
            else:
                live = 8 * MATRICES[name](*rest, **more) > cute_cpu.LANE
                note(np.where(live, address, self.smem.start), 16)
            return ordinary(self, address, *rest, **more)

        return method

    Ptx = type("Ptx", (cute_cpu.Ptx,), {name: counted(name) for name in names})
    with mock.patch.object(cute_cpu, "Ptx", Ptx):
        run()
    return met
