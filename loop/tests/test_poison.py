"""Poison and guard bands: what is poisoned, what is not, what a trespass looks like, and that everything is put
back."""

import math

import pytest
import torch

from loop import poison
from loop.poison import BAND, Poison

HERE = (f"{__file__.rpartition('/')[0]}/",)  # this test plays the code under test

CALLS = {
    "empty": lambda: torch.empty(3, 4, dtype=torch.bfloat16),
    "empty tuple": lambda: torch.empty((3, 4)),
    "empty_like": lambda: torch.empty_like(torch.zeros(4, 3).t()),
    "empty_strided": lambda: torch.empty_strided((3, 4), (1, 3), dtype=torch.float16),
    "new_empty": lambda: torch.zeros(1).new_empty(3, 4),
    "new_empty dtype": lambda: torch.zeros(1).new_empty((3, 4), dtype=torch.float64),
    "new_empty_strided": lambda: torch.zeros(1).new_empty_strided((3, 4), (8, 2)),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_uninitialised_memory_is_nan_and_looks_like_the_real_thing(call):
    plain = call()
    with Poison(HERE) as p:
        x = call()
    assert (x.shape, x.stride(), x.dtype, x.device) == (plain.shape, plain.stride(), plain.dtype, plain.device)
    assert torch.isnan(x).all()
    assert p.count == 1
    assert x.data_ptr() % 64 == 0
    assert not x._is_view()
    assert x.is_leaf
    assert p.trespassed() == []


def test_integers_and_booleans_have_their_own_pattern():
    with Poison(HERE):
        i, b = torch.empty(4, dtype=torch.int32), torch.empty(4, dtype=torch.bool)
    assert (i == 0x7F7F7F7F).all()
    assert b.all()


def test_other_code_is_left_alone():
    with Poison(("/nowhere/",)) as p:
        x = torch.empty(1000)
        torch.zeros(3)
    assert p.count == 0
    assert x.untyped_storage().nbytes() == 4000


def test_the_code_under_test_is_found_anywhere_on_the_stack():
    def library(make):
        return make()

    with Poison(HERE) as p:
        library(lambda: torch.empty(2))
    assert p.count == 1
    assert p.buffers[0].label.startswith("tests/test_poison.py:")


def test_the_real_folders_are_the_package_the_ideas_and_the_controls():
    package, ideas, controls = poison.under_test()
    assert package.endswith("/kernel_fun/")
    assert ideas.endswith("/ideas/")
    assert controls.endswith("/controls/")


def test_given_buffers_and_empty_ones_are_not_replaced():
    with Poison(HERE) as p:
        out = torch.zeros(2)
        assert torch.empty(2, out=out) is out
        assert torch.empty(0, 3).shape == (0, 3)
        assert torch.empty(2, device="meta").is_meta
    assert p.count == 0


def test_requires_grad_is_kept():
    with Poison(HERE):
        assert torch.empty(2, requires_grad=True).requires_grad


@pytest.mark.parametrize(
    ("offset", "side"), [(12, "past its end"), (BAND // 4 - 1 + 12, "past its end"), (-1, "before its start")]
)
def test_a_write_outside_is_found_and_named(offset, side):
    with Poison(HERE) as p:
        x, other = torch.empty(3, 4), torch.empty(3, 4)
        x.fill_(1)
        other.fill_(1)
        element(x, offset).fill_(7.0)
    found = p.trespassed()
    assert len(found) == 1
    assert "test_poison.py" in found[0]
    assert side in found[0]


def element(x, offset):
    """The element `offset` places after x's first, wherever that is."""
    return x.as_strided((1,), (1,), x.storage_offset() + offset)


def test_the_first_byte_past_an_odd_body_is_guarded():
    with Poison(HERE) as p:
        x = torch.empty(3, dtype=torch.uint8)
        element(x, 3).fill_(0)
    assert len(p.trespassed()) == 1


def test_guarded_copies_keep_values_and_strides_and_sit_in_nan():
    x = torch.randn(2, 5, 6)[..., 1:4].transpose(0, 1)
    y, guard = poison.guarded(x, "input x")
    assert torch.equal(x, y)
    assert y.stride() == x.stride()
    assert torch.isnan(element(y, -1)).all()
    assert math.isnan(element(y, 1 + sum((n - 1) * s for n, s in zip(y.shape, y.stride(), strict=True))))
    assert poison.trespassed([guard]) == []
    poison.refill_bands([guard], 0)
    assert element(y, -1).item() == 0
    assert poison.trespassed([guard]) == []
    assert torch.equal(x, y)
    poison.refill_bands([guard], None)
    assert torch.isnan(element(y, -1)).all()


def test_other_fills():
    with Poison(HERE, body=0, band=0x3F) as p:
        x = torch.empty(4)
    assert (x == 0).all()
    assert 0.7 < element(x, 4).item() < 0.8
    assert p.trespassed() == []


def test_everything_is_put_back_also_after_an_error():
    before = [getattr(torch, n) for n in ("empty", "empty_like", "empty_strided")]
    with pytest.raises(ZeroDivisionError), Poison(HERE):
        raise ZeroDivisionError
    assert [getattr(torch, n) for n in ("empty", "empty_like", "empty_strided")] == before
    assert not {"new_empty", "new_empty_strided"} & set(vars(torch.Tensor))


def test_only_one_at_a_time():
    with Poison(HERE), pytest.raises(RuntimeError, match="already active"), Poison(HERE):
        pass


def test_a_backward_pass_is_covered():
    class Unwritten(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return torch.empty_like(g)

    with Poison(HERE):
        x = torch.ones(3, requires_grad=True)
        (grad,) = torch.autograd.grad(Unwritten.apply(x).sum(), x)
    assert torch.isnan(grad).all()
