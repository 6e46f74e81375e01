"""Runs a Gluon kernel's Python as plain torch, so that a machine without a GPU can check what it computes.

Layouts and barriers are ignored, programs run one after another, and each asynchronous operation takes effect either
at its issue or at the wait that covers it: a tile overwritten while a copy or a product may still use it gives wrong
numbers in one of the two modes. Races between warps are not seen. Shared memory starts as NaN; an mbarrier's bytes and
phase are checked.
"""
import itertools
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path

import torch

from loop import interpreter

MODES = ("early", "late")
_GLUON = "triton.experimental.gluon"


@dataclass
class Clock:
    """When asynchronous operations happen, and those still outstanding in the program that runs."""

    products: str = "late"
    loads: str = "late"
    stores: str = "late"
    program: int = 0
    groups: list = field(default_factory=list)
    bulk: list = field(default_factory=list)
    barriers: dict = field(default_factory=dict)


class Pointer:
    def __init__(self, tensor, offset=0):
        self.tensor, self.offset = tensor, offset

    def __add__(self, other):
        return Pointer(self.tensor, self.offset + other)


class Descriptor:
    layout = None

    def __init__(self, tensor, block):
        self.tensor, self.block, self.dtype = tensor, list(block), tensor.dtype

    @staticmethod
    def from_tensor(tensor, block, layout):
        return Descriptor(tensor, block)


def tiles(x, columns, rows_of_tile, columns_of_tile):
    """Stands in for `kernel_fun._common.tiles.tiles`."""
    return Descriptor(x.view(-1, columns), [rows_of_tile, columns_of_tile])


class Shared:
    """A view of shared memory."""

    def __init__(self, view):
        self.view, self.dtype = view, view.dtype

    def index(self, i):
        return Shared(self.view[int(i)])

    def slice(self, start, length, dim=0):
        return Shared(self.view.narrow(dim, int(start), int(length)))

    def permute(self, order):
        return Shared(self.view.permute(*order))

    def load(self, layout):
        return self.view.clone()

    def store(self, value):
        assert (value.dtype, value.shape) == (self.dtype, self.view.shape), "a store converts nothing"
        self.view.copy_(value)

    def _reinterpret(self, dtype, shape, layout):
        flat = self.view.view(dtype).view(-1)
        return Shared(flat[: torch.Size(shape).numel()].view(*shape))


class Product:
    def __init__(self, a, b, acc, use_acc):
        self.a, self.b, self.acc, self.use_acc, self.value = a, b, acc, use_acc, None

    def run(self):
        if self.value is None:
            acc = self.acc.value if isinstance(self.acc, Product) else self.acc
            a = self.a.view if isinstance(self.a, Shared) else self.a
            value = a.float() @ self.b.view.float()
            self.value = value + acc if self.use_acc else value


def _hopper(clock):
    """Stand-ins for the language's Hopper module."""

    def warpgroup_mma(a, b, acc, *, use_acc=True, is_async=False):
        clock.groups.append(Product(a if isinstance(a, Shared) else a.clone(), b, acc, use_acc))
        if clock.products == "early" or not is_async:
            clock.groups[-1].run()
        return clock.groups[-1]

    def warpgroup_mma_wait(outstanding, deps):
        done = len(clock.groups) - outstanding
        for product in clock.groups[:done]:
            product.run()
        del clock.groups[:done]
        assert all(x.value is not None for x in deps), "waits for too little"
        return deps[0].value if len(deps) == 1 else tuple(x.value for x in deps)

    def barrier_of(shared):
        return clock.barriers[shared.view.data_ptr()]

    def init(bar, count):
        clock.barriers[bar.view.data_ptr()] = {"copies": [], "bytes": 0, "phases": 0}

    def invalidate(bar):
        assert not clock.barriers.pop(bar.view.data_ptr())["copies"], "copies nobody waited for"

    def expect(bar, count, pred=True):
        barrier_of(bar)["bytes"] += count if pred else 0

    def wait(bar, phase, pred=True):
        if pred:
            state = barrier_of(bar)
            assert state["bytes"] == sum(size for size, _ in state["copies"]) > 0, "bytes expected and copied differ"
            for _, copy in state["copies"]:
                copy()
            state.update(copies=[], bytes=0, phases=state["phases"] + 1)
            assert (state["phases"] - 1) & 1 == int(phase), "waits for the wrong phase"

    def async_copy_global_to_shared(desc, at, bar, dst, pred=True):
        if pred:
            (row, col), (rows, cols) = map(int, at), desc.block
            assert (desc.block, desc.dtype) == (list(dst.view.shape), dst.dtype)
            dst.view.fill_(float("nan"))

            def copy():
                tile = desc.tensor[row : row + rows, col : col + cols]
                dst.view.zero_()
                dst.view[: tile.shape[0], : tile.shape[1]] = tile

            if clock.loads == "early":
                copy()
            size = rows * cols * desc.tensor.element_size()
            barrier_of(bar)["copies"].append((size, copy if clock.loads == "late" else lambda: None))

    def async_copy_shared_to_global(desc, at, src):
        (row, col), (rows, cols) = map(int, at), desc.block
        assert (desc.block, desc.dtype) == (list(src.view.shape), src.dtype)

        def copy():
            kept = min(rows, desc.tensor.shape[0] - row)
            desc.tensor[row : row + kept, col : col + cols] = src.view[:kept]

        clock.bulk.append(copy)
        if clock.stores == "early":
            store_wait(0)

    def store_wait(outstanding):
        done = len(clock.bulk) - outstanding
        for copy in clock.bulk[:done]:
            copy()
        del clock.bulk[:done]

    return types.SimpleNamespace(
        fence_async_shared=lambda: None, warpgroup_mma=warpgroup_mma, warpgroup_mma_wait=warpgroup_mma_wait,
        mbarrier=types.SimpleNamespace(
            init=init, invalidate=invalidate, expect=expect, wait=wait, MBarrierLayout=lambda: None,
        ),
        tma=types.SimpleNamespace(
            async_copy_global_to_shared=async_copy_global_to_shared,
            async_copy_shared_to_global=async_copy_shared_to_global, store_wait=store_wait,
        ),
    )


def _language(clock):
    """Stand-in for the Gluon language: what kernels here use of it."""

    def load(pointer, mask=None, other=0.0):
        at, flat = torch.as_tensor(pointer.offset), pointer.tensor.reshape(-1)
        if mask is None:
            return flat[at]
        mask = torch.as_tensor(mask).expand_as(at)
        return torch.where(mask, flat[torch.where(mask, at, 0)], torch.tensor(other, dtype=flat.dtype))

    def store(pointer, value, mask=None):
        mask = torch.ones_like(pointer.offset, dtype=torch.bool) if mask is None else mask.expand_as(pointer.offset)
        pointer.tensor.view(-1)[pointer.offset[mask]] = value[mask]

    def allocate_shared_memory(dtype, shape, layout):
        return Shared(torch.full(shape, float("nan") if dtype.is_floating_point else 0, dtype=dtype))

    layouts = dict.fromkeys(
        ("NVMMADistributedLayout", "DotOperandLayout", "BlockedLayout", "SliceLayout", "SwizzledSharedLayout",
         "NVMMASharedLayout"), lambda *args, **kwargs: None,
    )
    dtypes = {name: getattr(torch, name) for name in ("float32", "float16", "bfloat16", "int32", "int64")}
    return types.SimpleNamespace(
        constexpr=object, static_range=range, barrier=lambda: None, exp2=torch.exp2, load=load, store=store,
        arange=lambda start, end, layout=None: torch.arange(start, end),
        where=lambda mask, a, b: torch.where(mask, a, torch.as_tensor(b, dtype=a.dtype)),
        zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
        convert_layout=lambda x, layout: x, sum=lambda x, axis: x.sum(axis),
        minimum=lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b)),
        maximum=lambda a, b: torch.maximum(torch.as_tensor(a), torch.as_tensor(b)),
        program_id=lambda axis: torch.tensor(clock.program),
        allocate_shared_memory=allocate_shared_memory, **layouts, **dtypes,
    )


def _jit(clock):
    class Kernel:
        def __init__(self, fn):
            self.fn = fn

        def __call__(self, *args):
            return self.fn(*args)

        def __getitem__(self, grid):
            def launch(*args, num_warps, **kwargs):
                wrap = {torch.Tensor: Pointer, int: torch.tensor}
                args = [wrap.get(type(x), lambda x: x)(x) for x in args]
                for clock.program in range(grid[0]):
                    self.fn(*args, **kwargs)
                    while clock.bulk:
                        clock.bulk.pop(0)()
                    assert not [*clock.groups, *clock.barriers], "the program leaves something outstanding"

            return launch

    return lambda fn=None, **options: Kernel if fn is None else Kernel(fn)


def load(path: Path):
    """(the module at `path`, its Gluon kernels running as torch; the Clock that says when operations happen)."""
    interpreter.install()                     # for the plain Triton kernels beside them
    clock = Clock()
    language, hopper = _language(clock), _hopper(clock)
    gluon = types.SimpleNamespace(jit=_jit(clock), language=language)
    fakes = {
        "triton.experimental": types.SimpleNamespace(gluon=gluon),
        _GLUON: gluon,
        f"{_GLUON}.language": language,
        f"{_GLUON}.language.nvidia.hopper": hopper,
        f"{_GLUON}.nvidia.hopper": types.SimpleNamespace(TensorDescriptor=Descriptor),
        "kernel_fun._common.tiles": types.SimpleNamespace(tiles=tiles),
    }
    for name in (f"{_GLUON}.language.nvidia", f"{_GLUON}.nvidia"):
        fakes[name] = types.SimpleNamespace()
    kept = {name: sys.modules.get(name) for name in fakes}
    module = types.ModuleType(f"{path.parent.name}_as_torch")
    module.__file__ = str(path)
    sys.modules.update(fakes)
    try:
        exec(compile(path.read_text(), str(path), "exec"), vars(module))
    finally:
        for name, old in kept.items():
            if old is None:
                del sys.modules[name]
            else:
                sys.modules[name] = old
    return module, clock


def schedules():
    """Every choice of early and late for products, loads and stores."""
    return list(itertools.product(MODES, repeat=3))
