"""Runs idea 014's CuTe kernel on the CPU: the 128 threads of a CTA in lockstep, as numpy arrays, warp by warp where it
branches. Copies to shared memory land when they are waited for, and until then their place holds NaNs, as all shared
memory does at first. Nobody lags behind, so a missing barrier goes unnoticed.
"""

import types
from pathlib import Path

import numpy as np
import torch

from kernel_fun._common import blocks as real_blocks

N, WARPS = 128, 4
LANE = np.arange(N) % 32
BASE = np.arange(N) - LANE
F, U = np.float32, np.uint32
QUIET = {"over": "ignore", "invalid": "ignore", "divide": "ignore", "under": "ignore"}


def threads(x, dtype):
    return np.broadcast_to(np.asarray(x).astype(dtype), (N,))


def number(dtype):
    return lambda x: np.asarray(x).astype(dtype) if np.ndim(x) else dtype(x)


def bits(x):
    return np.ascontiguousarray(threads(x, F)).view(U) if np.asarray(x).dtype == F else threads(x, U)


def as_float(x):
    return np.ascontiguousarray(np.asarray(x, U)).view(F)


def to_bf16(x):
    y = np.ascontiguousarray(threads(x, F)).view(U).astype(np.uint64)
    y = (y + 0x7FFF + ((y >> 16) & 1)) >> 16
    return np.where(np.isnan(np.asarray(x)), 0x7FC0, y).astype(U)


def to_half(x):
    with np.errstate(**QUIET):
        return threads(x, F).astype(np.float16).view(np.uint16).astype(U)


def from_bf16(x):
    return as_float(x.astype(U) << U(16))


def from_half(x):
    return x.astype(np.uint16).view(np.float16).astype(F)


def flushed(function):
    """fp32 in and out, denormals to zero, as the approximate instructions do."""

    def run(*x):
        with np.errstate(**QUIET):
            y = np.asarray(function(*(np.asarray(z, F) for z in x)), F)
        return np.where(np.abs(y) < F(2.0**-126), F(0), y)

    return run


class Memory:
    """Bytes at addresses from `start` on; everybody who touches others is an error."""

    def __init__(self, size, start):
        self.bytes, self.start = np.full(size, 0xFF, np.uint8), start

    def at(self, address, n):
        i = np.asarray(address, np.int64)[..., None] - self.start + np.arange(n)
        assert not i.size or (i.min() >= 0 and i.max() < len(self.bytes))
        assert not (np.asarray(address) % min(n, 16)).any(), "not aligned"
        return i

    def read(self, address, n, dtype):
        return np.ascontiguousarray(self.bytes[self.at(address, n)]).view(dtype)

    def write(self, address, x):
        if len(x):
            x = np.ascontiguousarray(x)
            self.bytes[self.at(address, x[0].nbytes)] = x.view(np.uint8).reshape(len(x), -1)


class Machine:
    """The instructions of `_common.ptx` and `_common.blocks` that the kernel uses."""

    def __init__(self, gmem, smem):
        self.gmem, self.smem, self.groups, self.open = gmem, smem, [], []
        self.active = np.ones(N, bool)

    # ---- memory
    def copy16(self, to, to_offset, address, offset, n):
        to, address = threads(to, np.int64) + to_offset, threads(address, np.int64) + offset
        self.smem.write(to, np.full((N, 16), 0xFF, np.uint8))
        self.open.append((to, address, threads(16 if n is None else n, np.int64) > 0))

    def commit(self):
        self.groups.append(self.open)
        self.open = []

    def wait_group(self, n):
        while len(self.groups) > n:
            for to, address, live in self.groups.pop(0):
                data = np.zeros((N, 16), np.uint8)
                data[live] = self.gmem.read(address[live], 16, np.uint8)
                self.smem.write(to, data)

    def _lds(self, address, n, dtype):
        return list(self.smem.read(threads(address, np.int64), 4 * n, dtype).T)

    def _sts(self, address, x, p=1):
        live = self.active & (threads(p, np.int64) != 0)
        self.smem.write(threads(address, np.int64)[live], np.stack([bits(y) for y in x], 1)[live])

    lds1 = lambda self, a: self._lds(a, 1, F)[0]  # noqa: E731
    lds4 = lambda self, a: self._lds(a, 4, F)  # noqa: E731
    lds_frag = lambda self, a: self._lds(a, 4, U)  # noqa: E731
    sts1 = lambda self, a, x: self._sts(a, [x])  # noqa: E731
    sts_frag = lambda self, a, x: self._sts(a, x)  # noqa: E731
    sts4_if = lambda self, p, a, x: self._sts(a, x, p)  # noqa: E731

    def store(self, kind, address, offset, x, p=None):
        live = threads(1 if p is None else p, np.int64) != 0
        self.gmem.write((threads(address, np.int64) + offset)[live], np.stack([bits(y) for y in x], 1)[live])

    # ---- arithmetic
    zeros = staticmethod(lambda n: [F(0)] * n)
    ex2, lg2 = staticmethod(flushed(np.exp2)), staticmethod(flushed(np.log2))
    rcp = staticmethod(flushed(lambda x: F(1) / x))
    rsqrt = staticmethod(flushed(lambda x: F(1) / np.sqrt(x)))
    ex2_below = staticmethod(flushed(lambda x: np.exp2(-np.abs(x))))
    fma = staticmethod(flushed(lambda a, b, c: a * b + c))
    at_least = staticmethod(lambda x, y: np.maximum(x, F(y)))
    leading_bits = staticmethod(lambda x: as_float(bits(x) & U(0xFFFFE000)))
    pick = staticmethod(lambda p, a, b: np.where(np.asarray(p) != 0, np.asarray(a, F), np.asarray(b, F)).astype(F))
    pack = staticmethod(lambda lo, hi: to_bf16(lo) | to_bf16(hi) << U(16))
    pack_half = staticmethod(lambda lo, hi: to_half(lo) | to_half(hi) << U(16))
    unpack = staticmethod(lambda x: (as_float(bits(x) << U(16)), as_float(bits(x) & U(0xFFFF0000))))
    shuffle = staticmethod(lambda x, lane: threads(x, F)[BASE + threads(lane, np.int64)])

    # ---- matrices; the layouts are those of the PTX manual
    @staticmethod
    def _matrix(x):
        """[warps, 8, 8] bit patterns from a packed pair of each lane."""
        x = bits(x)
        return np.stack([x & U(0xFFFF), x >> U(16)], 1).reshape(WARPS, 8, 8)

    @staticmethod
    def _lanes(x):
        x = np.ascontiguousarray(x).reshape(N, 2).astype(U)
        return x[:, 0] | x[:, 1] << U(16)

    def transpose(self, x):
        return self._lanes(self._matrix(x).transpose(0, 2, 1))

    def _load(self, address, turn):
        x = self.smem.read(threads(address, np.int64), 16, np.uint16).reshape(WARPS, 4, 8, 8)
        return [self._lanes(x[:, i].transpose(turn)) for i in range(4)]

    rows = lambda self, a: self._load(a, (0, 1, 2))  # noqa: E731
    ldmatrix = lambda self, a: self._load(a, (0, 2, 1))  # noqa: E731

    def put_if(self, p, address, x):
        live = threads(p, np.int64) != 0
        assert (live.reshape(WARPS, 32).all(1) == live.reshape(WARPS, 32).any(1)).all(), "a warp divided"
        x = np.stack([self._matrix(y) for y in x or [U(0)] * 4], 1).astype(np.uint16).reshape(N, 8)
        self.smem.write(threads(address, np.int64)[live], x[live])

    put = lambda self, a, x: self.put_if(1, a, x)  # noqa: E731

    def _product(self, c, a, b, value):
        t = [value(self._matrix(x)) for x in a]
        a = np.concatenate([np.concatenate(t[:2], 1), np.concatenate(t[2:], 1)], 2)
        b = np.concatenate([value(self._matrix(x)).transpose(0, 2, 1) for x in b], 1)
        c = np.stack([threads(x, F) for x in c], 1).reshape(WARPS, 8, 4, 2, 2).transpose(0, 3, 1, 2, 4)
        with np.errstate(**QUIET):
            out = (c.reshape(WARPS, 16, 8) + (a.astype(np.float64) @ b).astype(F)).astype(F)
        return list(out.reshape(WARPS, 2, 8, 4, 2).transpose(0, 2, 3, 1, 4).reshape(N, 4).T)

    mma16 = lambda self, c, a, b: self._product(c, a, b, from_bf16)  # noqa: E731
    mma16_half = lambda self, c, a, b: self._product(c, a, b, from_half)  # noqa: E731


class Tensor:
    """A flat tensor in the memory."""

    def __init__(self, x, memory, address):
        self.x, self.memory, self.address = x, memory, address
        self.iterator = types.SimpleNamespace(toint=lambda: np.int64(address))

    def __getitem__(self, i):
        size = self.x.element_size()
        raw = self.memory.read(self.address + np.asarray(i, np.int64) * size, size, np.uint8)
        wide = torch.float32 if self.x.dtype.is_floating_point else torch.int64
        return torch.from_numpy(np.ascontiguousarray(raw)).view(self.x.dtype).to(wide).numpy()[..., 0]


def load(path):
    """The idea's module and a copy of `_common.blocks`, both as plain functions."""
    source = path.read_text().replace("@cute.kernel\n", "").replace("@cute.jit\ndef _exchange", "def _exchange")
    module, blocks = types.ModuleType("on_the_cpu"), types.ModuleType("kernel_fun._common.blocks_on_the_cpu")
    module.__file__, blocks.__package__ = str(path), real_blocks.__package__
    exec(compile(source, str(path), "exec"), vars(module))
    exec(compile(Path(real_blocks.__file__).read_text(), real_blocks.__file__, "exec"), vars(blocks))
    module.blocks, module.one_warps_exchange = blocks, module._exchange
    return module


def launcher(module, key):
    """Stands in for the compiled kernel: takes the flat tensors and the numbers it takes."""
    cfg = module._Config(*key)
    types_ = {"Int32": np.int32, "Int64": np.int64, "Uint32": U, "Float32": F}

    def start(*given):
        tensors, numbers, (chunks, batch) = given[:18], given[18:-2], given[-2:]
        where, end = {}, 256
        for x in tensors:
            if (x.data_ptr(), x.numel()) not in where:  # one may be given twice
                where[x.data_ptr(), x.numel()] = end
                end += -(-x.numel() * x.element_size() // 256) * 256 + 256
        places = [where[x.data_ptr(), x.numel()] for x in tensors]
        gmem = Memory(end, 0)
        for x, place in zip(tensors, places, strict=True):
            gmem.bytes[place : place + x.numel() * x.element_size()] = x.contiguous().view(torch.uint8).numpy()
        flat = [Tensor(x, gmem, place) for x, place in zip(tensors, places, strict=True)]
        arch = types.SimpleNamespace(
            thread_idx=lambda: (np.arange(N, dtype=np.int32), 0, 0), make_warp_uniform=lambda x: x,
            alloc_smem=lambda *a: types.SimpleNamespace(toint=lambda: np.int32(4096)), sync_warp=lambda: None,
            sync_threads=lambda: None,
        )
        module.cute = types.SimpleNamespace(arch=arch)
        module.cutlass = types.SimpleNamespace(min=np.minimum, range=lambda n, unroll: range(n))
        module.const_expr, module.range_constexpr = (lambda x: x), range
        for name, dtype in types_.items():
            setattr(module, name, number(dtype))
            setattr(module.blocks, name, number(dtype))
        for y, z, x in np.ndindex(chunks, batch, cfg.HV):
            arch.block_idx = lambda at=(x, y, z): tuple(np.int32(i) for i in at)
            machine = Machine(gmem, Memory(cfg.smem, 4096))
            module.ptx = module.blocks.ptx = machine
            for name in dir(machine):
                if not name.startswith("_") and hasattr(real_blocks, name):
                    setattr(module.blocks, name, getattr(machine, name))

            def exchange(w, *args, machine=machine):
                for warp in range(WARPS):
                    machine.active = np.asarray(w) == warp
                    module.one_warps_exchange(warp, *args)
                machine.active = np.ones(N, bool)

            module._exchange = exchange
            with np.errstate(**QUIET):
                module._kernel(*flat, *(np.int32(n) if isinstance(n, int) else F(n) for n in numbers), cfg)
        for x, place in zip(tensors, places, strict=True):
            data = torch.from_numpy(gmem.bytes[place : place + x.numel() * x.element_size()].copy())
            x.view(-1).copy_(data.view(x.dtype))

    return start
