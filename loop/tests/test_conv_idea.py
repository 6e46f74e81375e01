"""Idea 001 and the convolution's reference: every feature, against autograd in fp64 and against each other."""

import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from kernel_fun._common.problem import ConvProblem
from kernel_fun.cconv import reference
from loop import registry, sm90

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ARCH = torch.cuda.get_device_capability() if DEVICE == "cuda" else (0, 0)
GRADS = ("dx", "dw", "db", "dresidual", "dh0")
# One unit of relative RMS per dtype: rounding of the stored result is 1.7e-3 in bf16, 2.1e-4 in fp16.
TOL = {torch.float32: 1e-6, torch.float16: 4e-4, torch.bfloat16: 3e-3}


@pytest.fixture(scope="module")
def idea():
    return registry.load("001")


def make(B, T, D, W, *, act="silu", bias=True, residual=True, h0=True, ht=True, cu=None, dtype=torch.float64, seed=0):
    """A problem and its tensors, on the device, with the gradients that come from outside."""
    rng = torch.Generator().manual_seed(seed)

    def draw(*shape, dtype=dtype):
        return torch.randn(shape, generator=rng, dtype=torch.float64).to(DEVICE, dtype)

    N = B if cu is None else len(cu) - 1
    wide = dtype if dtype == torch.float64 else torch.float32
    p = ConvProblem(
        B,
        T,
        D,
        W,
        N,
        dtype=dtype,
        w_dtype=wide,
        activation=act,
        has_bias=bias,
        has_residual=residual,
        has_h0=h0,
        output_final_state=ht,
        varlen=cu is not None,
        arch=ARCH,
    )
    return SimpleNamespace(
        p=p,
        x=draw(B, T, D),
        weight=draw(D, W, dtype=wide),
        bias=draw(D, dtype=wide) if bias else None,
        residual=draw(B, T, D) if residual else None,
        h0=draw(N, D, W) if h0 else None,
        dy=draw(B, T, D),
        dht=draw(N, D, W) if ht else None,
        cu_seqlens=None if cu is None else torch.tensor(cu, device=DEVICE),
    )


def both(module_spans, c):
    """Outputs of both passes as the chain calls them."""
    common = {"x": c.x, "weight": c.weight, "bias": c.bias, "h0": c.h0, "p": c.p, "cu_seqlens": c.cu_seqlens}
    out = module_spans["fwd"](**common, residual=c.residual)
    return out | module_spans["bwd"](**common, dy=c.dy, dht=c.dht)


def in_fp64(c):
    cast = {k: v.double() for k, v in vars(c).items() if torch.is_tensor(v) and v.is_floating_point()}
    return SimpleNamespace(**(vars(c) | cast))


def assert_matches(out, ref, dtype):
    assert out.keys() == ref.keys()
    for name, want in ref.items():
        got = out[name]
        if want is None:
            assert got is None, name
            continue
        assert got.shape == want.shape, name
        assert torch.isfinite(got).all(), name
        error = (got.double() - want).norm() / want.norm().clamp(min=1e-30)
        assert error < TOL[dtype], f"{name}: {error:.2e}"


CU = [0, 0, 1, 3, 3, 14, 29, 29]  # empty at both ends and inside, one token, shorter than the window


def autograd(c):
    """The same function by F.conv1d and torch's own differentiation, sequence by sequence."""
    leaves = {n: getattr(c, n) for n in ("x", "weight", "bias", "residual", "h0")}
    leaves = {n: t.detach().clone().requires_grad_() for n, t in leaves.items() if t is not None}
    x, weight, W = leaves["x"], leaves["weight"], c.p.W
    spans = [(b, 0, c.p.T) for b in range(c.p.B)]
    if c.cu_seqlens is not None:
        spans = [(0, s, e) for s, e in itertools.pairwise(c.cu_seqlens.tolist())]
    ys, hts = [], []
    for n, (b, s, e) in enumerate(spans):
        past = leaves["h0"][n] if c.p.has_h0 else x.new_zeros(c.p.D, W)
        full = torch.cat([past, x[b, s:e].t()], 1)
        hts.append(full[:, full.shape[1] - W :])
        if e > s:
            y = F.conv1d(full[None, :, 1:], weight[:, None], leaves.get("bias"), groups=c.p.D)[0]
            ys.append((F.silu(y) if c.p.activation else y).t())
    y, ht = torch.cat(ys).view(c.x.shape), torch.stack(hts)
    if c.p.has_residual:
        y = y + leaves["residual"]
    loss = (y * c.dy).sum() + ((ht * c.dht).sum() if c.p.output_final_state else 0)
    grads = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    out = {"y": y.detach(), "ht": ht.detach() if c.p.output_final_state else None}
    return out | {g: grads.get({"dw": "weight", "db": "bias"}.get(g, g[1:])) for g in GRADS}


@pytest.mark.parametrize("W", [2, 3, 4, 5])
@pytest.mark.parametrize("cu", [None, CU])
@pytest.mark.parametrize("on", [True, False])
def test_reference_is_the_derivative(W, cu, on):
    c = make(1 if cu else 2, 29, 6, W, act="silu" if on else None, bias=on, residual=on, h0=on, ht=on, cu=cu)
    got, want = both(reference.STAGES, c), autograd(c)
    for name, t in want.items():
        assert (t is None) == (got[name] is None), name
        if t is not None:
            torch.testing.assert_close(got[name], t, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("W", "dtype"), [(2, torch.float16), (3, torch.float32), (4, torch.float32), (4, torch.bfloat16)]
)
@pytest.mark.parametrize("cu", [None, CU])
def test_all_features_at_once(idea, W, cu, dtype):
    c = make(1 if cu else 2, 29, 40, W, cu=cu, dtype=dtype)
    assert_matches(both(idea.SPANS, c), both(reference.STAGES, in_fp64(c)), dtype)


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"act": "silu"},
        {"bias": True},
        {"residual": True},
        {"h0": True},
        {"ht": True},
        {"h0": True, "act": "silu"},
    ],
    ids=str,
)
def test_each_feature_alone(idea, flags):
    flags = {"act": None, "bias": False, "residual": False, "h0": False, "ht": False} | flags
    c = make(2, 18, 64, 4, dtype=torch.float32, **flags)
    assert_matches(both(idea.SPANS, c), both(reference.STAGES, in_fp64(c)), torch.float32)


@pytest.mark.parametrize(("T", "W"), [(1, 4), (2, 4), (3, 4), (4, 4), (7, 4), (18, 4), (1, 2), (2, 2), (2, 3)])
def test_short_and_ragged_rows(idea, T, W):
    c = make(2, T, 48, W, dtype=torch.float32)
    assert_matches(both(idea.SPANS, c), both(reference.STAGES, in_fp64(c)), torch.float32)


@pytest.mark.parametrize("rows", [4, 7, 16])
@pytest.mark.parametrize("cu", [None, CU, [0, 9, 10, 11, 13, 29]])
def test_strips_join(idea, rows, cu, monkeypatch):
    """Any strip length gives the same result: windows, trailing gradients and dht across cuts."""
    monkeypatch.setattr(idea, "_strip_rows", lambda *args: rows)
    c = make(1 if cu else 2, 29, 32, 4, cu=cu, dtype=torch.float32)
    assert_matches(both(idea.SPANS, c), both(reference.STAGES, in_fp64(c)), torch.float32)


def test_strides(idea):
    """Slices of one projection, time-major inputs, and the stride-0 gradient of a sum, without a copy."""
    plain = make(2, 21, 32, 4, dtype=torch.float32)
    want = both(reference.STAGES, in_fp64(plain))

    def sliced(t):
        return torch.cat([t, t, t], -1)[..., t.shape[-1] : 2 * t.shape[-1]]

    def transposed(t):
        return t.transpose(1, 2).contiguous().transpose(1, 2)

    for change in (sliced, transposed, lambda t: t.repeat_interleave(2, 1)[:, ::2]):
        c = SimpleNamespace(**(vars(plain) | {"x": change(plain.x), "dy": change(plain.dy)}))
        assert not c.x.is_contiguous()
        assert_matches(both(idea.SPANS, c), want, torch.float32)
    ones = SimpleNamespace(**(vars(plain) | {"dy": torch.ones((), device=DEVICE).expand(2, 21, 32)}))
    out = both(idea.SPANS, ones)
    assert out["dresidual"] is ones.dy
    assert_matches(out, both(reference.STAGES, in_fp64(ones)), torch.float32)


@pytest.mark.parametrize(("B", "T"), [(2, 0), (0, 8), (0, 0)])
def test_nothing_to_do(idea, B, T):
    c = make(B, T, 32, 4, dtype=torch.float32)
    out, want = both(idea.SPANS, c), both(reference.STAGES, c)
    for name, t in want.items():
        assert torch.equal(out[name], t), name


def test_large_arguments_stay_finite(idea):
    c = make(1, 9, 32, 4, dtype=torch.float32)
    c.x *= 1e4
    assert_matches(both(idea.SPANS, c), both(reference.STAGES, in_fp64(c)), torch.float32)


def test_dtypes_of_the_outputs(idea):
    c = make(2, 9, 32, 4, dtype=torch.bfloat16)
    c.h0, c.weight = c.h0.float(), c.weight.half()
    out = both(idea.SPANS, c)
    got = {name: t.dtype for name, t in out.items()}
    assert got == {
        "y": torch.bfloat16,
        "ht": torch.bfloat16,
        "dx": torch.bfloat16,
        "dresidual": torch.bfloat16,
        "dw": torch.float16,
        "db": torch.float32,
        "dh0": torch.float32,
    }


def test_same_inputs_same_bits(idea):
    c = make(2, 29, 40, 4, dtype=torch.bfloat16)
    first, second = both(idea.SPANS, c), both(idea.SPANS, c)
    assert all(torch.equal(first[n], second[n]) for n in first)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"W": 5}, "needs W in 2..4, got 5"),
        ({"dtype": torch.float64}, "needs x in bfloat16, float16 or float32, got float64"),
        ({"w_dtype": torch.float64}, "needs weight in bfloat16, float16 or float32, got float64"),
        ({"activation": "gelu"}, "needs activation None or 'silu', got 'gelu'"),
        ({"arch": (8, 0)}, "needs compute capability 9.0 or newer, got 8.0"),
    ],
)
def test_declines_with_a_reason(idea, change, reason):
    fields = {"B": 1, "T": 8, "D": 32, "W": 4, "N": 1} | change
    assert idea.supports(ConvProblem(**fields)) == (False, reason)
    assert idea.supports(ConvProblem(1, 8, 32, 4, 1)) == (True, "")


@pytest.mark.parametrize("longest", [None, 128])
def test_strips_cover_every_row_in_few_waves(idea, longest):
    shapes = [(8192, 64, 1056), (65536, 4, 1056), (2048, 64, 660), (8192, 256, 660), (1, 1, 1056), (20, 3, 8)]
    for T, columns, slots in shapes:
        rows = idea._strip_rows(T, columns, slots, 4, 3, longest)
        ctas = columns * -(-T // rows)
        assert rows % 4 == 3
        assert longest is None or rows <= longest + 4
        if ctas > slots:  # no wave may be mostly empty
            assert ctas / (-(-ctas // slots) * slots) > 0.9, (T, columns, rows)


def test_a_small_input_still_fills_the_machine(idea):
    assert idea._strip_rows(4096, 4, 1056, idea.FWD["G"], 0, idea.FWD["rows"]) <= 24


def test_hopper_build(idea):
    """The main loops keep to the registers and the shared memory that the literals count on, and store 8 bytes or more
    a thread; the backward's copies are asynchronous."""
    forward, backward = sm90.compile_each(idea.COMPILE)
    for built, cfg in ((forward, idea.FWD), (backward, idea.BWD)):
        assert built.spills == 0
        assert built.regs * cfg["warps"] * 32 * cfg["ctas"] <= 65536
        assert built.smem * cfg["ctas"] <= 227 * 1024
        assert "STG.E.64" in built.sass or "STG.E.128" in built.sass
    assert forward.smem == 0
    assert "LDGSTS" in backward.sass
