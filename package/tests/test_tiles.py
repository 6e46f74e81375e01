"""Descriptors that are copied from one which Triton has checked are those that it would have made."""

import pytest
import torch
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernel_fun._common import launch
from kernel_fun._common import tiles as module
from kernel_fun._common.tiles import tiles

# every (dtype, columns of the matrix, rows and columns of a tile) of the kernels that use them, with two heads
USED = [(half, 2 * K, 64, K) for half in (torch.bfloat16, torch.float16) for K in (64, 128)]
USED += [(torch.float32, 2 * K, 64, K) for K in (64, 128)]
USED += [(half, 2 * 256, 64, bv) for half in (torch.bfloat16, torch.float16) for bv in (64, 128)]
USED += [(half, 256, K, bv) for half in (torch.bfloat16, torch.float16) for K in (64, 128) for bv in (64, 128)]
USED += [(torch.bfloat16, 128, 64, 64), (torch.float16, 128, 64, 64)]


@pytest.fixture(autouse=True)
def none_yet(monkeypatch):
    monkeypatch.setattr(module, "_checked", {})


def ordinary(x, columns, *block):
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * x.element_size(), rank=2)
    return TensorDescriptor.from_tensor(x.view(-1, columns), [*block], layout)


def fields(made):
    """What a descriptor says; its base as address and dtype, sequences as lists."""
    out = {name: x for name, x in vars(made).items() if name != "launch_kind"}
    out["base"] = made.base.data_ptr(), made.base.dtype
    return out | {name: list(out[name]) for name in ("shape", "strides", "block_shape")}


@pytest.mark.parametrize("used", USED, ids=str)
def test_fields_are_the_constructors(used):
    dtype, columns, *block = used
    for rows in (1, 64, 200):
        x = torch.zeros(1, rows, columns // 64, 64, dtype=dtype)
        for _ in range(2):
            made = tiles(x, columns, *block)
            assert type(made) is TensorDescriptor
            assert fields(made) == fields(ordinary(x, columns, *block))
            assert launch.kinds([made]) == launch.kinds([ordinary(x, columns, *block)])
    assert len(module._checked) == 1


def test_only_the_first_of_a_kind_is_constructed(monkeypatch):
    made = []
    construct = module._construct
    monkeypatch.setattr(module, "_construct", lambda *a: made.append(a) or construct(*a))
    for rows in (64, 128, 7):
        tiles(torch.zeros(rows, 128, dtype=torch.bfloat16), 128, 64, 64)
    assert len(made) == 1
    tiles(torch.zeros(64, 128, dtype=torch.bfloat16), 128, 64, 128)
    tiles(torch.zeros(64, 128, dtype=torch.float16), 128, 64, 64)
    tiles(torch.zeros(64, 256, dtype=torch.bfloat16), 256, 64, 64)
    assert len(made) == 4


@pytest.mark.parametrize("first", [True, False])
def test_an_unaligned_base_is_copied(first):
    x = torch.arange(64 * 64 + 1).bfloat16()[1:].view(64, 64)
    assert x.data_ptr() % 16
    if not first:
        tiles(torch.zeros_like(x), 64, 64, 64)
    made = tiles(x, 64, 64, 64)
    assert made.base.data_ptr() % 16 == 0
    assert torch.equal(made.base, x)
    assert list(made.shape) == [64, 64]


def test_kinds_tell_apart_what_is_compiled_apart():
    x = torch.zeros(64, 128, dtype=torch.bfloat16)
    different = [
        tiles(x, 128, 64, 64), tiles(x, 128, 64, 128), tiles(x, 128, 128, 64), tiles(x.half(), 128, 64, 64),
        tiles(x.float(), 128, 64, 64),
    ]  # fmt: skip
    assert len({made.launch_kind for made in different}) == len(different)
    same = [tiles(x, 128, 64, 64), tiles(x, 64, 64, 64), tiles(torch.zeros(192, dtype=x.dtype), 64, 64, 64)]
    assert len({launch.kinds([made])[0] for made in same}) == 1


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("wrong", ["empty", "no matrix", "strided", "narrow lines"])
def test_what_is_unexpected_is_the_constructors_to_refuse(wrong, first):
    """The same errors as without copies, whether or not one of the kind has been made before."""
    x = torch.zeros(64, 128, dtype=torch.bfloat16)
    if not first:
        tiles(x, 128, 64, 64)
    x, columns = {
        "empty": (x[:0], 128), "no matrix": (x[:1, :100], 128), "strided": (x[:, ::2], 128), "narrow lines": (x, 4),
    }[wrong]  # fmt: skip
    with pytest.raises((AssertionError, RuntimeError)) as ordinarily:
        ordinary(x, columns, 64, 64)
    with pytest.raises(ordinarily.type):
        tiles(x, columns, 64, 64)


def test_a_descriptor_that_holds_other_things_is_always_constructed(monkeypatch):
    class Other:
        __slots__ = ("base", "block_shape", "layout")

        @staticmethod
        def from_tensor(x, block, layout):
            made = Other()
            made.base, made.block_shape, made.layout = x, block, layout
            return made

    monkeypatch.setattr(module, "TensorDescriptor", Other)
    x = torch.zeros(64, 128, dtype=torch.bfloat16)
    for _ in range(2):
        made = tiles(x, 128, 64, 64)
        assert isinstance(made, Other)
        assert made.base.shape == (64, 128)
    assert module._checked == {(torch.bfloat16, 128, 64, 64): {}}
