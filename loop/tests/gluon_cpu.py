"""Runs a Gluon kernel's Python body on torch tensors: its indexing, staging and order of steps, without a GPU.

Triton's interpreter does not know Gluon. Here layouts mean nothing and the threads of a program are one, so a missing
barrier goes unseen; but whatever is asynchronous on the GPU is as late as it may be:
    - shared memory starts as NaN; a copy makes its target NaN when issued and fills it when a wait covers its group;
    - a wgmma is computed when a wait covers it; its operand in shared memory must be what it was when issued;
    - a load or store through a pointer checks that every address it uses lies in its tensor.
"""
import types
from types import SimpleNamespace

import torch
from triton.runtime.jit import JITFunction


class Pointer:
    """A flat tensor and int64 offsets into it."""

    def __init__(self, data, at=0):
        self.data, self.at = data, at
        self.dtype = SimpleNamespace(element_ty=data.dtype)

    def __add__(self, offset):
        return Pointer(self.data, self.at + offset)

    def _where(self, mask):
        at = torch.as_tensor(self.at, dtype=torch.int64)
        mask = torch.as_tensor(True if mask is None else mask)
        at, mask = torch.broadcast_tensors(at, mask)
        used = at[mask]
        if used.numel() and (used.min() < 0 or used.max() >= self.data.numel()):
            raise IndexError(f"addresses {int(used.min())}..{int(used.max())} of {self.data.numel()}")
        return at, mask

    def load(self, mask, other):
        at, mask = self._where(mask)
        out = torch.full(at.shape, float("nan") if other is None else other).to(self.data.dtype)
        out[mask] = self.data[at[mask]]
        return out

    def store(self, value, mask):
        at, mask = self._where(mask)
        self.data[at[mask]] = value.expand(at.shape)[mask].to(self.data.dtype)


class Shared:
    def __init__(self, data):
        self.data, self.dtype = data, data.dtype

    def index(self, i):
        return Shared(self.data[i])

    def slice(self, start, length, dim=0):
        return Shared(self.data.narrow(dim, start, length))

    def permute(self, order):
        return Shared(self.data.permute(order))

    def load(self, layout):
        return self.data.clone()

    def store(self, value):
        assert value.dtype == self.dtype
        assert value.shape == self.data.shape
        self.data.copy_(value)


class _Queue:
    """Steps issued in order and completed, in order, by waits that leave the last n outstanding."""

    def __init__(self):
        self.steps = []

    def wait(self, n):
        while len(self.steps) > n:
            self.steps.pop(0)()


class _Product:
    def __init__(self, a, b, acc, use_acc):
        self.a, self.b, self.acc, self.use_acc = a.clone(), b.data, acc, use_acc
        self.issued, self.value = b.data.clone(), None

    def __call__(self):
        if not torch.equal(self.b.nan_to_num(), self.issued.nan_to_num()):
            raise AssertionError("shared memory changed under a product in flight")
        acc = self.acc.value if isinstance(self.acc, _Product) else self.acc
        self.value = self.a.float() @ self.b.float() + (acc if self.use_acc else 0)


def _gl(program):
    """What stands in for `triton.experimental.gluon.language` in one program."""
    number = torch.as_tensor

    def layout(*args, **kwargs):
        return None

    return SimpleNamespace(
        constexpr=object, float32=torch.float32, int32=torch.int32, int64=torch.int64,
        BlockedLayout=layout, SliceLayout=layout, NVMMADistributedLayout=layout, DotOperandLayout=layout,
        NVMMASharedLayout=layout, SwizzledSharedLayout=layout, convert_layout=lambda x, layout: x,
        program_id=lambda axis: torch.tensor(program), static_range=range, exp2=torch.exp2, where=torch.where,
        arange=lambda start, end, layout: torch.arange(start, end), zeros_like=torch.zeros_like,
        minimum=lambda a, b: torch.minimum(number(a), number(b)), permute=lambda x, order: x.permute(order),
        zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
        load=lambda p, mask=None, other=None: p.load(mask, other), store=lambda p, x, mask=None: p.store(x, mask),
        allocate_shared_memory=lambda dtype, shape, layout: Shared(torch.full(shape, float("nan"), dtype=dtype)),
    )


def _wgmma(queue):
    def mma(a, b, acc, use_acc=True, is_async=False):
        product = _Product(a, b, acc, use_acc)
        queue.steps.append(product)
        if not is_async:
            queue.wait(0)
        return product

    def wait(n, deps):
        queue.wait(n)
        done = [d.value if isinstance(d, _Product) else d for d in deps]
        assert all(x is not None for x in done), "a product is used before a wait covers it"
        return done[0] if len(done) == 1 else tuple(done)

    return mma, wait


def _copies(queue, group):
    def copy(target, pointer, mask=None):
        value = pointer.load(mask, 0)
        assert value.dtype == target.dtype
        assert value.shape == target.data.shape
        target.data.fill_(float("nan"))
        group.append((target.data, value))

    def commit():
        mine = list(group)
        group.clear()
        queue.steps.append(lambda: [target.copy_(value) for target, value in mine])

    return SimpleNamespace(async_copy_global_to_shared=copy, commit_group=commit, wait_group=queue.wait)


def run(kernel, grid: int, *args, **constexprs) -> None:
    """Run every program of a one-dimensional grid. Tensor arguments must be contiguous; they are written in place."""
    for program in range(grid):
        products, copies = _Queue(), _Queue()
        mma, wait = _wgmma(products)
        fakes = {
            "gl": _gl(program), "async_copy": _copies(copies, []), "warpgroup_mma": mma, "warpgroup_mma_wait": wait,
            "fence_async_shared": lambda: None, "_barrier": lambda: None,
        }
        body = types.FunctionType(kernel.fn.__code__, _globals(kernel.fn.__globals__, fakes))
        body(*(Pointer(x.view(-1)) if torch.is_tensor(x) else x for x in args), **constexprs)
        assert not products.steps + copies.steps, "asynchronous work outstanding at the end"


def _globals(module, fakes):
    out = {**module, **fakes}
    for name, value in module.items():
        if isinstance(value, JITFunction):
            out[name] = types.FunctionType(value.fn.__code__, out)
    return out
