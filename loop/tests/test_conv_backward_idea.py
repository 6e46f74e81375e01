"""Idea 024: the backward in tiles, of packed rows and of x that lies along time, against the fp64 reference."""

from types import SimpleNamespace

import pytest
import torch

from kernel_fun.cconv import reference
from loop import registry, sm90
from loop.tests.test_conv_forward_idea import never, turn
from loop.tests.test_conv_idea import CU, assert_matches, in_fp64, make


@pytest.fixture
def idea():
    """A module of its own for each test, which may change its constants."""
    return registry.fresh("024")


@pytest.fixture
def alone(idea, monkeypatch):
    """The idea without the kernels that it falls back on, and with runs that the interpreter is quick with."""
    monkeypatch.setattr(idea, "strip_bwd", never)
    monkeypatch.setattr(idea, "_strips", never)
    monkeypatch.setattr(idea, "RUN", (2, 1, 4, 2))
    monkeypatch.setattr(idea, "PACKED_RUN", (2, 1, 4, 2))
    return idea


def backward(module_spans, c):
    tensors = {n: getattr(c, n) for n in ("x", "weight", "bias", "h0", "dy", "dht")}
    return module_spans["bwd"](**tensors, p=c.p, cu_seqlens=c.cu_seqlens)


def check(idea, c):
    assert_matches(backward(idea.SPANS, c), backward(reference.STAGES, in_fp64(c)), c.x.dtype)


def rows(B, T, D, W, **flags):
    return make(B, T, D, W, h0=False, ht=False, **flags)


def stateless(B, T, D, W, **flags):
    return turn(rows(B, T, D, W, **flags))


@pytest.mark.parametrize(
    ("W", "dtype"), [(2, torch.float16), (3, torch.float32), (4, torch.float32), (4, torch.bfloat16)]
)
def test_every_width_and_dtype(alone, W, dtype):
    check(alone, stateless(2, 83, 40, W, dtype=dtype))


@pytest.mark.parametrize(
    ("W", "dtype"), [(2, torch.float16), (3, torch.float32), (4, torch.float32), (4, torch.bfloat16)]
)
@pytest.mark.parametrize("cu", [None, CU])
def test_every_width_and_dtype_by_rows(alone, cu, W, dtype):
    check(alone, rows(1 if cu else 2, 29, 40, W, cu=cu, dtype=dtype))


@pytest.mark.parametrize("flags", [{}, {"act": "silu"}, {"bias": True}, {"residual": True}], ids=str)
@pytest.mark.parametrize("lies", ["rows", "turned"])
def test_each_feature_alone(alone, lies, flags):
    flags = {"act": None, "bias": False, "residual": False} | flags
    check(alone, (stateless if lies == "turned" else rows)(2, 64, 64, 4, dtype=torch.float32, **flags))


@pytest.mark.parametrize("T", [2, 3, 7, 9, 64, 129])
def test_short_and_ragged_rows(alone, T):
    check(alone, stateless(2, T, 16, 4, dtype=torch.float32))
    check(alone, rows(2, T, 16, 4, dtype=torch.float32))
    check(alone, rows(1, T, 16, 4, dtype=torch.float32, cu=[0, 1, T]))


@pytest.mark.parametrize("constants", [{"ROWS": 4}, {"ROWS": 16, "WARPS": 2}, {"BYTES": 16}], ids=str)
@pytest.mark.parametrize("cu", [[0, 8, 9, 11, 16, 29], [0, *range(30)]])
def test_tiles_of_packed_rows_join(alone, cu, constants, monkeypatch):
    """Any tile gives the same result; sequences may start at any row of a segment, or at each."""
    monkeypatch.setattr(alone, "PACKED", "tiles")
    for name, value in constants.items():
        monkeypatch.setattr(alone, name, value)
    check(alone, rows(1, 29, 96, 4, cu=cu, dtype=torch.float32))


@pytest.mark.parametrize("cu", [[0, 8, 9, 11, 16, 29], [0, 29], [0, *range(30)]])
@pytest.mark.parametrize("run", [(2, 1, 4, 1), (1, 2, 4, 2), (2, 1, 8, 1)], ids=str)
def test_packed_runs_join(alone, run, cu, monkeypatch):
    monkeypatch.setattr(alone, "PACKED_RUN", run)
    for W, dtype in ((4, torch.float32), (3, torch.float16), (2, torch.bfloat16)):
        check(alone, rows(1, cu[-1], 72, W, cu=cu, dtype=dtype))


@pytest.mark.parametrize("stages", [0, 3])
@pytest.mark.parametrize("run", [(2, 1, 4, 1), (2, 1, 4, 2), (1, 2, 8, 1), (4, 1, 3, 3)], ids=str)
def test_runs_join(alone, run, stages, monkeypatch):
    """Any run gives the same result, whether its rows all exist (T = 48, 64) or not, and with two taps or four."""
    monkeypatch.setattr(alone, "RUN", run)
    monkeypatch.setattr(alone, "STAGES", stages)
    for T, D, W in ((48, 64, 4), (64, 128, 2), (53, 40, 3)):
        check(alone, rows(2, T, D, W, dtype=torch.float32, bias=W == 3))


@pytest.mark.parametrize("tile", [(16, 16, 4), (32, 32, 4)])
def test_turned_tiles_join(alone, tile, monkeypatch):
    monkeypatch.setattr(alone, "TURNED", tile)
    rows_of, channels = tile[:2]
    for T, D in ((4 * rows_of, 2 * channels), (2 * rows_of + 17, channels + 8)):
        check(alone, stateless(2, T, D, 4, dtype=torch.float32))


def test_gradients_in_any_strides(alone):
    """Time-major, a slice, and the stride-0 gradient of a sum, without a copy."""
    plain = stateless(2, 21, 32, 4, dtype=torch.float32)
    ones = torch.ones((), device=plain.x.device).expand(2, 21, 32)
    for dy in (turn(plain).dy, torch.cat([plain.dy] * 3, -1)[..., 32:64], plain.dy.mT.contiguous().mT, ones):
        c = SimpleNamespace(**(vars(plain) | {"dy": dy}))
        assert backward(alone.SPANS, c)["dresidual"] is dy
        check(alone, c)


def test_strides_of_dense_rows(alone):
    """Slices of a projection and every second row, without a copy."""
    plain = rows(2, 21, 32, 4, dtype=torch.float32)
    for change in (lambda t: torch.cat([t, t, t], -1)[..., 32:64], lambda t: t.repeat_interleave(2, 1)[:, ::2]):
        check(alone, SimpleNamespace(**(vars(plain) | {"x": change(plain.x)})))
        check(alone, SimpleNamespace(**(vars(plain) | {"dy": change(plain.dy)})))


def test_what_else_is_for_the_strips(idea, monkeypatch):
    """States are for all of 001; turned packed rows, a dy of other strides, many sequences and grids that would not fit
    for its kernel alone."""
    flags = {"dtype": torch.float32, "h0": False, "ht": False}
    plain, packed = make(2, 29, 32, 4, **flags), make(1, 29, 32, 4, cu=CU, **flags)
    start, end = (turn(make(2, 29, 32, 4, **(flags | {name: True}))) for name in ("h0", "ht"))
    others = [SimpleNamespace(**(vars(c) | {"dy": turn(SimpleNamespace(x=c.dy)).x})) for c in (plain, packed)]
    for c in (turn(packed), start, end, *others):
        check(idea, c)
    for name in ("strip_bwd", "_strips"):
        monkeypatch.setattr(idea, name, never)
    check(idea, turn(plain)), check(idea, packed), check(idea, plain)
    for c in (turn(packed), start, end, *others):
        with pytest.raises(AssertionError, match="the strips ran"):
            backward(idea.SPANS, c)
    monkeypatch.setattr(idea, "CUTS", 2)
    with pytest.raises(AssertionError, match="the strips ran"):
        backward(idea.SPANS, packed)
    monkeypatch.setattr(idea, "CUTS", 512)
    monkeypatch.setattr(idea, "GRID", 0)
    for c in (packed, plain, turn(plain)):
        with pytest.raises(AssertionError, match="the strips ran"):
            backward(idea.SPANS, c)


@pytest.mark.parametrize(("B", "T"), [(2, 0), (0, 8), (0, 0)])
def test_nothing_to_do(idea, B, T):
    c = stateless(B, T, 32, 4, dtype=torch.float32)
    out, want = backward(idea.SPANS, c), backward(reference.STAGES, c)
    assert all(torch.equal(out[name], t) for name, t in want.items() if t is not None)


def test_large_arguments_stay_finite(alone):
    for c in (stateless(1, 9, 32, 4, dtype=torch.float32), rows(1, 9, 32, 4, dtype=torch.float32)):
        c.x *= 1e4
        check(alone, c)


def test_same_inputs_same_bits(alone):
    for c in (stateless(2, 29, 40, 4, dtype=torch.bfloat16), rows(2, 29, 40, 4, dtype=torch.bfloat16)):
        first, second = backward(alone.SPANS, c), backward(alone.SPANS, c)
        assert all(torch.equal(first[n], second[n]) for n in ("dx", "dw", "db"))


def test_hopper_build(idea):
    """CTAs a multiprocessor as the text counts on; rows move 8 bytes a thread, turned x, dy and dx 16; hardly anything
    spills."""
    dense, packed, tiles, turned = sm90.compile_each(idea.COMPILE)
    assert tiles.spills <= 24
    assert tiles.regs * 32 * idea.WARPS * 2 <= 65536
    assert dense.spills == turned.spills == 0
    assert packed.spills <= 32
    assert packed.regs * 32 * idea.PACKED_RUN[0] * idea.PACKED_RUN[1] * 4 <= 65536
    assert dense.regs * 32 * idea.RUN[0] * idea.RUN[1] * 4 <= 65536
    assert turned.regs * 32 * idea.TURNED[2] * 4 <= 65536
    assert "STG.E.64" in tiles.sass
    assert dense.sass.count("STG.E.64") >= 16
    assert packed.sass.count("STG.E.64") >= 32
    assert turned.sass.count("LDG.E.128") >= 4
    assert turned.sass.count("STG.E.128") == 4
    assert "U16" not in packed.sass + dense.sass + tiles.sass + turned.sass
