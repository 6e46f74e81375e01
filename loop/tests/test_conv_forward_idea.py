"""Idea 023: tiles of plain and of packed rows, and of x that lies along time, against the fp64 reference."""

import re
from types import SimpleNamespace

import pytest
import torch

from kernel_fun.cconv import reference
from loop import registry, sm90
from loop.tests.test_conv_idea import CU, assert_matches, in_fp64, make


@pytest.fixture
def idea():
    """A module of its own for each test, which may change its constants."""
    return registry.fresh("023")


def forward(module_spans, c):
    tensors = {"x": c.x, "weight": c.weight, "bias": c.bias, "residual": c.residual, "h0": c.h0}
    return module_spans["fwd"](**tensors, p=c.p, cu_seqlens=c.cu_seqlens)


def check(idea, c):
    want = reference.STAGES["fwd"](
        **{n: getattr(in_fp64(c), n) for n in ("x", "weight", "bias", "residual", "h0")}, p=c.p, cu_seqlens=c.cu_seqlens
    )
    assert_matches(forward(idea.SPANS, c), want, c.x.dtype)


def turn(c):
    """The same values with time as the unit stride."""
    return SimpleNamespace(**(vars(c) | {"x": c.x.transpose(1, 2).contiguous().transpose(1, 2)}))


def never(*_, **__):
    raise AssertionError("the strips ran")


@pytest.fixture
def alone(idea, monkeypatch):
    """The idea without the kernel that it falls back on."""
    monkeypatch.setattr(idea, "strip_fwd", never)
    return idea


@pytest.mark.parametrize(
    ("W", "dtype"), [(2, torch.float16), (3, torch.float32), (4, torch.float32), (4, torch.bfloat16)]
)
@pytest.mark.parametrize("lies", ["plain", "packed", "turned"])
def test_all_features_at_once(alone, lies, W, dtype):
    c = make(1 if lies == "packed" else 2, 29, 40, W, h0=False, cu=CU if lies == "packed" else None, dtype=dtype)
    check(alone, turn(c) if lies == "turned" else c)


@pytest.mark.parametrize("flags", [{}, {"act": "silu"}, {"bias": True}, {"residual": True}, {"ht": True}], ids=str)
@pytest.mark.parametrize("lies", ["plain", "turned"])
def test_each_feature_alone(alone, lies, flags):
    flags = {"act": None, "bias": False, "residual": False, "h0": False, "ht": False} | flags
    c = make(2, 18, 64, 4, dtype=torch.float32, **flags)
    check(alone, turn(c) if lies == "turned" else c)


@pytest.mark.parametrize("T", [1, 2, 3, 4, 7, 8, 9, 16, 64, 65])
@pytest.mark.parametrize("lies", ["plain", "packed", "turned"])
def test_short_and_ragged_rows(alone, lies, T):
    c = make(1 if lies == "packed" else 2, T, 48, 4, h0=False, cu=[0, T] if lies == "packed" else None,
             dtype=torch.float32)  # fmt: skip
    check(alone, turn(c) if lies == "turned" else c)


@pytest.mark.parametrize(
    "constants", [{"ROWS": 4}, {"ROWS": 16, "WARPS": 2}, {"WARPS": 8}, {"BYTES": 16}], ids=str
)
@pytest.mark.parametrize("cu", [None, CU, [0, 9, 10, 11, 13, 29], [0, 8, 16, 29], [0, *range(30)]])
def test_tiles_join(alone, cu, constants, monkeypatch):
    """Any tile gives the same result; sequences may start at any row of a segment, or at each."""
    for name, value in constants.items():
        monkeypatch.setattr(alone, name, value)
    check(alone, make(1 if cu else 2, 29, 96, 4, h0=False, cu=cu, dtype=torch.float32))


def test_more_sequences_than_the_common_build_holds(alone):
    check(alone, make(1, 80, 40, 4, h0=False, cu=[0, 0, *range(3, 81)], dtype=torch.float32))


@pytest.mark.parametrize("tile", [(16, 16, 4), (32, 8, 4), (128, 64, 4)])
def test_turned_tiles_join(alone, tile, monkeypatch):
    monkeypatch.setattr(alone, "TURNED", tile)
    for T, D in ((32, 64), (41, 40)):
        check(alone, turn(make(2, T, D, 4, h0=False, dtype=torch.float32)))


def test_large_arguments_stay_finite(alone):
    c = make(2, 9, 32, 4, h0=False, dtype=torch.float32)
    c.x *= 1e4
    check(alone, c)


def test_strides(alone):
    """Slices of a projection and every second row, without a copy."""
    plain = make(2, 21, 32, 4, h0=False, dtype=torch.float32)
    for change in (lambda t: torch.cat([t, t, t], -1)[..., 32:64], lambda t: t.repeat_interleave(2, 1)[:, ::2]):
        c = SimpleNamespace(**(vars(plain) | {"x": change(plain.x)}))
        assert not c.x.is_contiguous()
        check(alone, c)


@pytest.mark.parametrize("lies", ["plain", "packed", "turned"])
def test_states_are_for_the_strips(idea, lies, monkeypatch):
    c = make(1 if lies == "packed" else 2, 21, 32, 4, cu=[0, 9, 9, 21] if lies == "packed" else None,
             dtype=torch.float32)  # fmt: skip
    c = turn(c) if lies == "turned" else c
    check(idea, c)
    monkeypatch.setattr(idea, "strip_fwd", never)
    with pytest.raises(AssertionError, match="the strips ran"):
        forward(idea.SPANS, c)


def test_what_else_is_for_the_strips(idea, monkeypatch):
    """Many sequences, turned packed rows, and grids and offsets that would not fit."""
    monkeypatch.setattr(idea, "CUTS", 3)
    packed = make(1, 29, 32, 4, h0=False, cu=[0, 3, 5, 29], dtype=torch.float32)
    many = make(1, 29, 32, 4, h0=False, cu=[0, 3, 5, 7, 29], dtype=torch.float32)
    long = make(2, 65, 32, 4, h0=False, dtype=torch.float32)
    check(idea, packed), check(idea, many), check(idea, turn(packed))
    monkeypatch.setattr(idea, "strip_fwd", never)
    forward(idea.SPANS, packed)
    monkeypatch.setattr(idea, "GRID", 2)
    for c in (many, turn(packed), long):
        with pytest.raises(AssertionError, match="the strips ran"):
            forward(idea.SPANS, c)
    assert not idea._fits(torch.empty((1, 1, 8)).as_strided((1, 1, 8), (2**31, 2**27, 1)), 32)


@pytest.mark.parametrize(("B", "T"), [(2, 0), (0, 8), (0, 0)])
def test_nothing_to_do(idea, B, T):
    c = make(B, T, 32, 4, dtype=torch.float32)
    out, want = forward(idea.SPANS, c), forward(reference.STAGES, c)
    assert all(torch.equal(out[name], t) for name, t in want.items())


def test_same_inputs_same_bits(alone):
    c = make(2, 29, 40, 4, h0=False, dtype=torch.bfloat16)
    for one in (c, turn(c)):
        assert torch.equal(forward(alone.SPANS, one)["y"], forward(alone.SPANS, one)["y"])


def test_hopper_build(idea):
    """CTAs a multiprocessor as the text counts on; wide loads and stores; x on its way before anything is computed."""
    plain, packed, turned = sm90.compile_each(idea.COMPILE)
    for built, width in ((plain, 64), (packed, 64), (turned, 128)):
        assert built.spills == 0
        assert f"LDG.E.{width}" in built.sass
        assert f"STG.E.{width}" in built.sass
        assert not re.search(r"(LDG|STG)\.E(\.U16|\.U8)? ", built.sass)
    assert plain.regs * 32 * idea.WARPS * 7 <= 65536
    assert packed.regs * 32 * idea.WARPS * 6 <= 65536
    assert turned.regs * 32 * idea.TURNED[2] * 7 <= 65536
    order = re.findall(r"\b(LDG|MUFU|FFMA)\b", plain.sass)
    assert "LDG" not in order[order.index("MUFU") :]
    assert "LDG" not in order[order.index("FFMA") :]
