"""Finds missing barriers in a kernel that `cute_cpu` runs: accesses of different threads to a byte of shared memory,
one of them a write, without a barrier of their warp in between, or of the CTA where they are of two warps."""

import numpy as np

from loop.tests import cute_cpu

T = np.arange(cute_cpu.THREADS)
NOBODY, MANY = -1, -2


class Ptx(cute_cpu.Ptx):
    """`cute_cpu.Ptx` that appends to `found` what is read or overwritten too early."""

    found: list  # of (what, first thread), set by a subclass

    def __init__(self, gmem, smem):
        super().__init__(gmem, smem)
        n, none = len(smem.bytes), lambda *shape: np.full(shape, NOBODY)
        self.epoch = np.zeros(2, int)  # barriers so far: of warps (all pass them together here), of the CTA
        self.writer, self.written, self.torn = none(n), none(2, n), np.zeros(n, bool)
        self.reader, self.read_at = none(cute_cpu.WARPS, n), none(2, cute_cpu.WARPS, n)  # the last of each warp

    def early(self, by, at, threads):
        """Whether accesses `by` others at epochs `at` are not behind a barrier that `threads` have passed too."""
        here = by // 32 == threads // 32
        return (by != NOBODY) & (by != threads) & np.where(here, at[0] >= self.epoch[0], at[1] >= self.epoch[1])

    def note(self, what, bad, threads):
        if bad.any():
            self.found.append((what, int(threads[bad][0])))

    def spread(self, address, n, threads):
        i = np.broadcast_to(address, (len(threads),)).astype(np.int64)[:, None] - self.smem.start + np.arange(n)
        return i, np.broadcast_to(threads[:, None], i.shape)

    def reads(self, address, n, threads=T, together=False):
        """`together`: what a thread has the address of goes to other lanes."""
        i, threads = self.spread(address, n, threads)
        me = np.full_like(threads, MANY) if together else threads
        self.note("read", self.torn[i] | self.early(self.writer[i], self.written[:, i], threads), threads)
        warp = threads // 32
        more = (self.read_at[0, warp, i] == self.epoch[0]) & (self.reader[warp, i] != threads)
        self.reader[warp, i] = np.where(more, MANY, me)
        self.read_at[:, warp, i] = self.epoch[:, None, None]

    def writes(self, address, n, threads=T):
        i, threads = self.spread(address, n, threads)
        for warp in range(cute_cpu.WARPS):
            by = self.reader[warp, i]
            by = np.where(by == MANY, np.where(threads == 32 * warp, 32 * warp + 1, 32 * warp), by)  # some other lane
            self.note("write", self.early(by, self.read_at[:, warp, i], threads), threads)
        self.torn[i] = self.early(self.writer[i], self.written[:, i], threads)  # only matters if it is read
        self.writer[i] = threads
        self.written[:, i] = self.epoch[:, None, None]

    def sync_warp(self):
        self.epoch[0] += 1

    def sync_cta(self):
        self.epoch += 1

    def lds(self, address, n, dtype):
        self.reads(address, 4 * n)
        return super().lds(address, n, dtype)

    def sts(self, address, x):
        self.writes(address, 4 * len(x))
        super().sts(address, x)

    sts1 = lambda self, a, x: self.sts(a, [x])  # noqa: E731
    sts2 = sts4 = sts_frag = sts

    def ldmatrix_n(self, address, n, transposed):
        live = 8 * n > cute_cpu.LANE
        self.reads(np.broadcast_to(address, live.shape)[live], 16, T[live], together=True)
        return super().ldmatrix_n(address, n, transposed)

    def put_turned(self, address, x):
        live = 8 * len(x) > cute_cpu.LANE
        self.writes(np.broadcast_to(address, live.shape)[live], 16, T[live])
        super().put_turned(address, x)

    def put_rows(self, address, x):
        live = 8 * len(x) > cute_cpu.LANE
        self.writes(np.broadcast_to(address, live.shape)[live], 16, T[live])
        super().put_rows(address, x)

    def copy(self, to, address, n, l2="", live=True):
        self.writes(to, n)
        super().copy(to, address, n, l2, live)

    def wait_group(self, n):
        for group in self.groups[: max(0, len(self.groups) - n)]:
            for to, _, size, _ in group:  # it lands now: a barrier before this is none for it
                i, threads = self.spread(to, size, T)
                self.writer[i] = threads
                self.written[:, i] = self.epoch[:, None, None]
        super().wait_group(n)
