"""Runs a CuTe kernel that is written in `_common.ptx` instructions on the CPU: a CTA's threads in lockstep, as numpy
arrays. Copies to shared memory land when they are waited for, and until then their place holds NaNs; addresses and
their alignment are checked. No thread lags behind: missing barriers are what `cute_races` finds."""

import contextlib
import itertools
import types
from functools import partial

import numpy as np
import torch

THREADS, WARPS = 256, 8
LANE = np.arange(THREADS) % 32
BASE = np.arange(THREADS) - LANE
KINDS = {"f32": np.float32, "b32": np.uint32}
OWN = {  # in a kernel's own file
    "put_turned", "put_rows", "load_state", "keep_order", "begun", "pause", "ask_l2", "ask_l2_for", "of_lane",
    "sum_later_lanes", "bound_pairs",
}
active = np.ones(THREADS, bool)


def threads(x, dtype):
    return np.broadcast_to(np.asarray(x).astype(dtype), (THREADS,))


def number(dtype):
    return lambda x: np.asarray(x).astype(dtype) if np.ndim(x) else dtype(x)


def bits(x):
    return threads(x, np.float32).view(np.uint32) if np.asarray(x).dtype == np.float32 else threads(x, np.uint32)


def round_bf16(x):
    y = np.ascontiguousarray(threads(x, np.float32)).view(np.uint32).astype(np.uint64)
    up = (y + 0x7FFF + ((y >> 16) & 1)) >> 16
    return np.where(np.isnan(np.asarray(x)), 0x7FC0, up).astype(np.uint32)


def as_float(x):
    return np.ascontiguousarray(x.astype(np.uint32)).view(np.float32)


def halves(x):
    """Two bf16 of each thread as fp32, [threads, 2]."""
    x = bits(x)
    return np.stack([as_float(x << 16), as_float(x & np.uint32(0xFFFF0000))], 1)


class Memory:
    """Bytes at addresses from `start` on; everybody who touches others is an error."""

    def __init__(self, size, start):
        self.bytes, self.start = np.full(size, 0xFF, np.uint8), start

    def at(self, address, n):
        i = np.asarray(address, np.int64)[..., None] - self.start + np.arange(n)
        assert i.min() >= 0
        assert i.max() < len(self.bytes)
        assert not (np.asarray(address) % min(n, 16)).any(), "not aligned"
        return i

    def read(self, address, n, dtype):
        return np.ascontiguousarray(self.bytes[self.at(address, n)]).view(dtype)

    def write(self, address, x):
        x = np.ascontiguousarray(x)
        self.bytes[self.at(address, x[0].nbytes)] = x.view(np.uint8).reshape(len(x), -1)


class Ptx:
    """The instructions, with the signatures of `_common.ptx`."""

    def __init__(self, gmem, smem):
        self.gmem, self.smem, self.open, self.groups, self.asked = gmem, smem, [], [], []

    # ---- memory
    def copy(self, to, address, n, l2="", live=True):
        live, to, address = (np.broadcast_to(x, (THREADS,)) for x in (live, to, address))
        self.smem.write(to, np.full((THREADS, n), 0xFF, np.uint8))
        self.smem.at(to, n)
        self.open.append((to, address, n, live))

    def copy_row(self, to, address, off, n, left, row, l2=""):
        self.copy(to, address + off, n, l2, threads(left, np.int32) > row)

    def commit(self):
        self.groups.append(self.open)
        self.open = []

    def wait_group(self, n):
        while len(self.groups) > n:
            for to, address, size, live in self.groups.pop(0):
                data = np.zeros((THREADS, size), np.uint8)
                if live.any():
                    data[live] = self.gmem.read(address[live], size, np.uint8)
                self.smem.write(to, data)

    def sync_warp(self):
        pass

    sync_cta = sync_warp

    def lds(self, address, n, dtype):
        return list(self.smem.read(threads(address, np.int64), 4 * n, dtype).T)

    def sts(self, address, x):
        self.smem.write(threads(address, np.int64), np.stack([bits(y) for y in x], 1))

    lds4 = lambda self, a: self.lds(a, 4, np.float32)  # noqa: E731
    lds2f = lambda self, a: self.lds(a, 2, np.float32)  # noqa: E731
    lds1 = lambda self, a: self.lds(a, 1, np.float32)[0]  # noqa: E731
    lds2 = lambda self, a: self.lds(a, 2, np.uint32)  # noqa: E731
    lds_frag = lambda self, a: self.lds(a, 4, np.uint32)  # noqa: E731
    sts1 = lambda self, a, x: self.sts(a, [x])  # noqa: E731
    sts2 = sts4 = sts_frag = sts

    def load_row(self, kind, n, dtype, address, off, left, row):
        live, out = threads(left, np.int32) > row, np.zeros((THREADS, n), KINDS[kind])
        if live.any():
            out[live] = self.gmem.read(threads(address + off, np.int64)[live], 4 * n, KINDS[kind])
        return list(out.T) if n > 1 else out[:, 0]

    def load_state(self, address, off):
        return list(self.gmem.read(threads(address + off, np.int64), 16, np.uint32).T)

    def keep_order(self, *given):
        pass

    begun = pause = keep_order

    def ask_l2(self, address, off, flag, n=1):
        self.asked.extend((int(x) + off, n) for x in threads(address, np.int64)[threads(flag, bool)])

    ask_l2_for = lambda self, address, n, flag: self.ask_l2(address, 0, flag, n)  # noqa: E731

    def store_row(self, kind, address, off, left, row, *x):
        live = threads(left, np.int32) > row
        if live.any():
            self.gmem.write(threads(address + off, np.int64)[live], np.stack([bits(y) for y in x], 1)[live])

    # ---- arithmetic
    zeros = staticmethod(lambda n: [np.float32(0)] * n)
    ex2 = staticmethod(lambda x: np.exp2(x, dtype=np.float32))
    lg2 = staticmethod(lambda x: np.log2(x, dtype=np.float32))
    rcp = staticmethod(lambda x: np.float32(1) / x)
    larger = staticmethod(np.maximum)
    at_most = staticmethod(lambda x, n: np.minimum(x, np.float32(n) if isinstance(n, float) else np.int32(n)))
    pick = staticmethod(lambda flag, a, b: np.where(np.asarray(flag) != 0, a, b).astype(np.float32))
    pack = staticmethod(lambda lo, hi: round_bf16(lo) | round_bf16(hi) << np.uint32(16))
    unpack = staticmethod(lambda x: tuple(halves(x).T))

    # ---- lanes
    exchange = staticmethod(lambda x, lanes: threads(x, np.float32)[BASE + (LANE ^ lanes)])
    of_row = staticmethod(lambda x, row: threads(x, np.float32)[BASE + LANE % 4 + 4 * row])

    def sum_lanes(self, x, *steps):
        for step in steps:
            x = x + self.exchange(x, step)
        return x

    @staticmethod
    def rows(x):
        return threads(x, np.float32).reshape(WARPS, 8, 4)

    def sum_later_rows(self, x):
        return np.cumsum(self.rows(x)[:, ::-1], 1, dtype=np.float32)[:, ::-1].reshape(-1)

    @staticmethod
    def bound(rows, step, limit):
        """`bound_exponents` of arrays [warps, 8 rows, columns]."""
        bad = np.max([np.abs(x).max((1, 2), keepdims=True) for x in rows], 0) > limit
        out = []
        for x in rows:
            fall = np.maximum(-np.diff(x, axis=1, prepend=x[:, :1]) - np.float32(step), 0)
            y = x + np.cumsum(fall, 1, dtype=np.float32)
            out.append(np.where(bad, y - (y[:, 3:4] + y[:, 4:5]) / 2, x))
        return out

    def bound_exponents(self, e, step, limit):
        return [x.reshape(-1) for x in self.bound([self.rows(x) for x in e], step, limit)]

    # ---- eight rows of four lanes
    of_lane = staticmethod(lambda x, lane: threads(x, np.float32)[BASE + LANE // 4 * 4 + lane])

    @staticmethod
    def sum_later_lanes(x):
        x = threads(x, np.float32).reshape(-1, 4)
        later = np.cumsum(x[:, :0:-1], 1, dtype=np.float32)[:, ::-1]
        return np.concatenate([later, np.zeros_like(x[:, :1])], 1).reshape(-1)

    def bound_pairs(self, e, step, limit):
        columns = [np.stack([threads(x, np.float32) for x in e[i : i + 2]], 1) for i in range(0, len(e), 2)]
        rows = [x.reshape(WARPS, 8, 8).transpose(0, 2, 1) for x in columns]
        out = [x.transpose(0, 2, 1).reshape(THREADS, 2) for x in self.bound(rows, step, limit)]
        return [y for x in out for y in x.T]

    # ---- matrices; the layouts are those of the PTX manual
    @staticmethod
    def tile(x):
        """[warps, 8, 8] from a packed pair of each lane."""
        return halves(x).reshape(WARPS, 8, 8)

    @staticmethod
    def lanes(tile):
        x = round_bf16_any(tile).reshape(THREADS, 2)
        return x[:, 0] | x[:, 1] << np.uint32(16)

    def transpose(self, x):
        return self.lanes(self.tile(x).transpose(0, 2, 1))

    def ldmatrix_n(self, address, n, transposed):
        address = np.where(8 * n > LANE, threads(address, np.int64), self.smem.start)
        rows = self.smem.read(address, 16, np.uint16).reshape(WARPS, 4, 8, 8)
        tiles = as_float(rows.astype(np.uint32) << 16).reshape(rows.shape)
        return [self.lanes(tiles[:, i].transpose(0, 2, 1) if transposed else tiles[:, i]) for i in range(n)]

    def put(self, address, tiles):
        address = threads(address, np.int64).reshape(WARPS, 4, 8)[:, : len(tiles)].reshape(-1)
        self.smem.write(address, round_bf16_any(np.stack(tiles, 1)).astype(np.uint16).reshape(-1, 8))

    def put_turned(self, address, x):
        self.put(address, [self.tile(y).transpose(0, 2, 1) for y in x])

    def put_rows(self, address, x):
        self.put(address, [self.tile(y) for y in x])

    def product(self, c, a, b):
        c = np.stack([threads(x, np.float32) for x in c], 1).reshape(WARPS, 8, 4, 2, 2).transpose(0, 3, 1, 2, 4)
        with np.errstate(invalid="ignore"):  # rows of a that mean nothing, and are not used, may hold anything
            out = c.reshape(WARPS, 16, 8) + (a.astype(np.float64) @ b).astype(np.float32)
        return list(out.reshape(WARPS, 2, 8, 4, 2).transpose(0, 2, 3, 1, 4).reshape(THREADS, 4).T)

    def mma8(self, c, a, b):
        return self.product(c, np.concatenate([self.tile(x) for x in a], 1), self.tile(b).transpose(0, 2, 1))

    def mma16(self, c, a, b):
        t = [self.tile(x) for x in a]
        a = np.concatenate([np.concatenate(t[:2], 1), np.concatenate(t[2:], 1)], 2)
        return self.product(c, a, np.concatenate([self.tile(x).transpose(0, 2, 1) for x in b], 1))


def round_bf16_any(x):
    y = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((y + 0x7FFF + ((y >> 16) & 1)) >> 16).astype(np.uint32)


class Tensor:
    """A flat tensor in the memory; element_type is its torch dtype."""

    def __init__(self, x, memory, address):
        self.x, self.memory, self.address, self.element_type = x, memory, address, x.dtype
        self.iterator = types.SimpleNamespace(toint=lambda: np.int64(address))

    def __getitem__(self, i):
        size = self.x.element_size()
        raw = self.memory.read(self.address + np.asarray(i, np.int64) * size, size, np.uint8)
        return torch.from_numpy(np.ascontiguousarray(raw)).view(self.x.dtype).to(
            torch.float32 if self.x.dtype.is_floating_point else torch.int64).numpy()[..., 0]

    def __setitem__(self, i, x):
        size = self.x.element_size()
        data = x.view(torch.uint8).numpy().reshape(THREADS, size)
        self.memory.write((self.address + np.asarray(i, np.int64) * size)[active], data[active])


class Value(np.ndarray):
    def to(self, dtype):
        return torch.from_numpy(np.ascontiguousarray(self)).to(dtype)


@contextlib.contextmanager
def where(mask):
    before = active.copy()
    active[:] = mask
    yield
    active[:] = before


def load(path):
    """The idea's module with its kernel as a plain function over `launch(tensors, *numbers)`: see `launcher`."""
    source = path.read_text().replace("@cute.kernel\n", "")
    source = source.replace("    if tid < n_t:\n", "    with where(tid < n_t):\n")
    module = types.ModuleType("on_the_cpu")
    exec(compile(source, str(path), "exec"), module.__dict__)
    return module


def far_out(monkeypatch):
    """Lets 2^x be infinite, as on the device, where it is beyond fp32: for sigmoids so far out that they are then 0."""

    def ex2(x):
        with np.errstate(over="ignore"):
            return np.exp2(x, dtype=np.float32)

    monkeypatch.setattr(Ptx, "ex2", staticmethod(ex2))


def launcher(module, cfg):
    """Stands in for the compiled kernel: takes the flat tensors and the numbers the kernel takes."""

    def launch(*given):
        tensors, numbers, grid = given[:25], given[25:-2], given[-2:]
        places, at = [], 256
        for x in tensors:
            places.append(at)
            at += -(-x.numel() * x.element_size() // 256) * 256 + 256
        gmem, smem = Memory(at, 0), Memory(getattr(module, "ALL", module.SMEM), 4096)
        for x, place in zip(tensors, places, strict=True):
            gmem.bytes[place : place + x.numel() * x.element_size()] = x.contiguous().view(torch.uint8).numpy()
        flat = [Tensor(x, gmem, place) for x, place in zip(tensors, places, strict=True)]
        arch = types.SimpleNamespace(
            thread_idx=lambda: (np.arange(THREADS, dtype=np.int32), 0, 0), make_warp_uniform=lambda x: x,
            grid_dim=lambda: (*map(np.int32, grid), 1),
            alloc_smem=lambda *a: types.SimpleNamespace(toint=lambda: np.int32(4096)),
        )
        module.cute = types.SimpleNamespace(arch=arch)
        module.cutlass = types.SimpleNamespace(min=np.minimum)
        module.const_expr, module.range_constexpr, module.where = (lambda x: x), range, where
        module.Int32, module.Int64, module.Uint32 = number(np.int32), number(np.int64), number(np.uint32)
        module.Float32 = lambda x: number(np.float32)(x).view(Value) if np.ndim(x) else np.float32(x)
        for pid in itertools.product(range(grid[0]), range(grid[1])):
            arch.block_idx = lambda pid=pid: (*map(np.int32, pid), 0)
            smem.bytes[:] = 0xFF
            module.ptx = Ptx(gmem, smem)
            for name in filter(partial(hasattr, module), OWN):
                setattr(module, name, getattr(module.ptx, name))
            with np.errstate(over="raise", invalid="raise", divide="raise", under="ignore"):
                module._kernel(*flat, *(np.int32(x) if isinstance(x, int) else np.float32(x) for x in numbers), cfg)
        for x, place in zip(tensors, places, strict=True):
            data = torch.from_numpy(gmem.bytes[place : place + x.numel() * x.element_size()].copy())
            x.view(-1).copy_(data.view(x.dtype))

    return launch
