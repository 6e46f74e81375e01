"""A declined call reaches fla whole and unchanged, with its reason in the log once; switches are read at every call."""
import types
from dataclasses import dataclass

import pytest
import torch
from small_inputs import conv, kda
from torch.utils.checkpoint import checkpoint

from kernel_fun import cconv
from kernel_fun._common import dispatch, support
from kernel_fun.kda import chunk_kda, is_supported

MINE = {"kda": (chunk_kda, "chunk_kda"), "cconv": (cconv.causal_conv1d, "causal_conv1d")}
WHERE = {"kda": "fla.ops.kda.chunk_kda", "cconv": "fla.modules.convolution.causal_conv1d"}


class Stub:
    """Stands in for fla's function: remembers how it was called."""

    def __init__(self):
        self.calls = []
        self.inside = []

    def __call__(self, *args, **kwargs):
        self.calls.append((args, kwargs))
        self.inside.append(support.inside_fla_only())
        return "o", "ht"


@pytest.fixture
def fla_kda(monkeypatch):
    stub = Stub()
    monkeypatch.setattr("fla.ops.kda.chunk_kda", stub)
    return stub


@pytest.fixture
def fla_conv(monkeypatch):
    import fla.modules.convolution as module

    stub = Stub()
    monkeypatch.setattr(module, "causal_conv1d", stub)
    return stub


def test_the_callers_arguments_arrive_verbatim(monkeypatch, fla_kda):
    """The same objects under the same names, defaults left out; and fla never dispatches back to us."""
    monkeypatch.setenv("KERNEL_FUN_DISABLE", "1")
    tensors, _ = kda(h0=True)
    context = object()
    given = {"scale": 0.1, "initial_state": tensors["initial_state"], "output_final_state": True, "cp_context": context,
             "use_graph": True, "max_num_seqs": 3, "A_log": tensors["q"], "chunk_size": 32, "surprise": context}
    five = [tensors[name] for name in ("q", "k", "v", "g", "beta")]
    assert chunk_kda(*five, **given) == ("o", "ht")
    args, kwargs = fla_kda.calls[0]
    assert args == ()
    assert {*kwargs} == {"q", "k", "v", "g", "beta", *given}
    assert all(kwargs[name] is value for name, value in given.items())
    assert all(kwargs[name] is t for name, t in zip(("q", "k", "v", "g", "beta"), five, strict=True))
    assert fla_kda.inside == [True]
    assert not support.inside_fla_only()


def test_conv_arguments_arrive_verbatim(fla_conv):
    tensors, _ = conv(bias=True)
    index = torch.zeros(1)
    x, weight, bias = tensors.values()
    assert cconv.causal_conv1d(x, weight, bias, backend="mix", seq_idx=index) == ("o", "ht")
    args, kwargs = fla_conv.calls[0]
    assert args == ()
    assert {*kwargs} == {"x", "weight", "bias", "backend", "seq_idx"}
    assert kwargs["seq_idx"] is index
    assert kwargs["x"] is x
    assert fla_conv.inside == [True]


@pytest.mark.parametrize("alone", [False, True])
def test_the_backward_of_a_declined_convolution_stays_flas(monkeypatch, alone):
    """fla dispatches it when autograd runs it, long after the call. What that backward recomputes is not fla's, and
    one that raises leaves nothing behind."""
    inside, recomputed, broken = [], [], []

    class Convolution(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2, x[:, -1] * 1

        @staticmethod
        def backward(ctx, dy, _):
            assert ctx.saved_tensors
            inside.append(support.inside_flas_backward())
            if broken:
                raise MemoryError
            return dy * 2

    def fla(x, **_):
        y, ht = Convolution.apply(x)
        return y if alone else (y, ht)

    monkeypatch.setattr("fla.modules.convolution.causal_conv1d", fla)
    x = torch.randn(1, 4, 8, requires_grad=True)
    got = cconv.causal_conv1d(x, torch.randn(8, 4), backend="mix")
    assert inside == []
    (got if alone else got[0]).sum().backward()
    assert inside == [True]
    assert not support.inside_flas_backward()
    assert torch.equal(x.grad, torch.full_like(x, 2.0))

    def block(x):
        recomputed.append(support.inside_fla_only())
        return cconv.causal_conv1d(x.sin(), torch.randn(8, 4), backend="mix")

    got = checkpoint(block, x, use_reentrant=False)
    (got if alone else got[0]).sum().backward()
    assert recomputed == [False, False]
    broken.append(True)
    got = cconv.causal_conv1d(x, torch.randn(8, 4), backend="mix")
    with pytest.raises(MemoryError):
        (got if alone else got[0]).sum().backward()
    assert inside == [True, True, True]
    assert not support.inside_flas_backward()
    assert not support.inside_fla_only()


def test_an_error_inside_fla_passes_through(monkeypatch):
    monkeypatch.setenv("KERNEL_FUN_DISABLE", "1")

    def broken(**kwargs):
        raise KeyError("theirs")

    monkeypatch.setattr("fla.ops.kda.chunk_kda", broken)
    tensors, flags = kda()
    with pytest.raises(KeyError, match="theirs"):
        chunk_kda(**tensors, **flags)
    assert not support.inside_fla_only()


@pytest.mark.parametrize("family", ["kda", "cconv"])
@pytest.mark.parametrize("said", [
    RuntimeError("0 active drivers ([]). There should only be one."),
    ValueError("Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)"),
])
def test_fla_on_cpu_tensors_is_one_line_with_the_reason(monkeypatch, family, said):
    """What Triton says without a GPU, and with one; on tensors elsewhere it is left as it is."""
    def without_gpu(**kwargs):
        raise said

    monkeypatch.setattr(WHERE[family], without_gpu)
    monkeypatch.setenv("KERNEL_FUN_DISABLE", "1")
    operator, name = MINE[family]
    tensors, _ = kda(grad=False) if family == "kda" else conv()
    with pytest.raises(RuntimeError) as raised:
        operator(**tensors)
    want = f"{name} on CPU tensors went to fla, whose kernels need a GPU, because: KERNEL_FUN_DISABLE is set"
    assert str(raised.value) == want
    assert not support.inside_fla_only()
    with pytest.raises(type(said)) as raised:
        operator(**{name: t.to("meta") for name, t in tensors.items()})
    assert raised.value is said


@pytest.mark.skipif(torch.cuda.is_available(), reason="what Triton itself says without a GPU")
@pytest.mark.parametrize("family", ["kda", "cconv"])
def test_the_real_fla_on_cpu_tensors(monkeypatch, family):
    monkeypatch.setenv("KERNEL_FUN_DISABLE", "1")
    tensors, _ = kda(dtype=torch.float32) if family == "kda" else conv(dtype=torch.float32)
    operator, name = MINE[family]
    with pytest.raises(RuntimeError, match=f"{name} on CPU tensors went to fla, whose kernels need a GPU"):
        operator(**tensors)


@pytest.mark.parametrize("family", ["kda", "cconv"])
def test_a_disabled_operator_judges_no_argument(monkeypatch, family, fla_kda, fla_conv):
    monkeypatch.setenv("KERNEL_FUN_DISABLE", "1")
    tensors, _ = kda(grad=False) if family == "kda" else conv()
    assert MINE[family][0](**dict.fromkeys(tensors)) == ("o", "ht")


# ----------------------------------------------------------------------------------------------------------- switches
@pytest.mark.parametrize(("name", "kda_off", "conv_off"), [
    ("KERNEL_FUN_DISABLE", True, True),
    ("KERNEL_FUN_KDA_DISABLE", True, False),
    ("KERNEL_FUN_CCONV_DISABLE", False, True),
])
def test_switches_are_read_at_every_call(monkeypatch, fla_kda, fla_conv, name, kda_off, conv_off):
    k, kf = kda(grad=False)
    c, cf = conv()
    for value, on in (("1", True), ("0", False), ("true", True), ("", False), ("YES", True), ("off", False)):
        monkeypatch.setenv(name, value)
        fla_kda.calls.clear()
        fla_conv.calls.clear()
        chunk_kda(**k, **kf)
        cconv.causal_conv1d(**c, **cf)
        assert (len(fla_kda.calls), len(fla_conv.calls)) == (on and kda_off, on and conv_off), value
        assert is_supported(**k, **kf)[0] is not (on and kda_off)
        assert cconv.is_supported(**c, **cf)[0] is not (on and conv_off)


def test_a_bad_value_warns_once_and_is_ignored(monkeypatch, lines):
    monkeypatch.setenv("KERNEL_FUN_DISABLE", "maybe")
    tensors, flags = kda(grad=False)
    for _ in range(3):
        assert is_supported(**tensors, **flags)[0]
    accepted = "accepted are 1, true, yes, on, 0, false, no, off"
    assert lines() == [("WARNING", f"KERNEL_FUN_DISABLE='maybe' is ignored: {accepted}")]


# ---------------------------------------------------------------------------------------------------------- log lines
def test_one_line_for_what_runs(lines):
    """Plain torch is not called engaged: a run's check for that word must fail where no kernel runs."""
    tensors, flags = kda(grad=False)
    for _ in range(3):
        chunk_kda(**tensors, **flags)
    cconv.causal_conv1d(**conv()[0])
    (first, versions), *rest = lines()
    assert first == "INFO"
    assert versions.startswith("kernel-fun versions: kernel_fun ")
    assert rest == [("INFO", f"kernel-fun {family}: no kernel runs (plain torch on CPU tensors)") for family in MINE]
    support.engaged("kda", "k001_mine")
    assert lines()[-1] == ("INFO", "kernel-fun kda: engaged (k001_mine)")


def test_one_line_per_kind_of_reason(lines, fla_kda):
    """Two reasons that differ only in their numbers are one kind: varying shapes do not flood a log."""
    tensors, flags = kda(sequences=(4, 8), T=12, grad=False)
    for start in (1, 2, 3):
        flags["cu_seqlens"] = torch.tensor([start, 12])
        chunk_kda(**tensors, **flags)
        chunk_kda(**tensors, use_graph=True)
    assert lines() == [
        ("WARNING", f"kernel-fun kda: falling back to fla: {reason} (fla cannot run on CPU tensors)")
        for reason in ("cu_seqlens does not start at 0", "use_graph=True")
    ]
    support.fell_back("kda", "needs K=64 or 128, got 96", Elsewhere)
    support.fell_back("kda", "needs K=64 or 128, got 80", Elsewhere)
    assert lines()[2:] == [("WARNING", "kernel-fun kda: falling back to fla: needs K=64 or 128, got 96")]


def test_debug_logs_every_call_and_shows_unconfigured(monkeypatch, lines):
    monkeypatch.setenv("KERNEL_FUN_DEBUG", "1")
    tensors, flags = kda(grad=False)
    for _ in range(3):
        chunk_kda(**tensors, **flags)
    assert [level for level, text in lines() if "no kernel runs" in text] == ["WARNING"] * 3


def test_is_supported_logs_nothing_and_runs_nothing(lines, fla_kda):
    tensors, flags = kda(grad=False)
    assert is_supported(**tensors, **flags)[0]
    assert not is_supported(**tensors, **flags, use_graph=True)[0]
    assert lines() == []
    assert fla_kda.calls == []


# ------------------------------------------------------------------------------------------------------------- routes
class Chain:
    """A chain without kernels for the problem, or with one."""

    def __init__(self, reasons=(), steps=()):
        self.reasons, self.steps, self.made = list(reasons), list(steps), 0

    def shipped_for(self, p):
        return self.steps, self.reasons

    def make_plan(self, p, base="fla", shipped=True, grad=True):
        self.made += 1
        return Plan(base)


class Plan:
    saved = ()
    forward = (types.SimpleNamespace(source="k001_mine", span=("fwd.all",)),)
    backward = tuple(types.SimpleNamespace(source=f"fla:bwd.{name}", span=(f"bwd.{name}",)) for name in "abc")

    def __init__(self, base):
        self.base = base

    def sources(self):
        return ("k001_mine", "fla:bwd") if self.base == "fla" else ("reference:fwd",)

    def run_forward(self, env, meta):
        return {"ran": "fwd"}

    def run_backward(self, env, meta):
        return {"ran": "bwd"}


@dataclass(frozen=True)
class Problem:
    name: object = "problem"
    B: int = 1
    T: int = 1


class Elsewhere:
    """A tensor's place, as a route sees it."""

    is_cpu, is_cuda = False, True
    device = torch.device("cuda", 3)


class Source:
    source = "k001_mine"


def test_a_problem_without_kernels_goes_to_fla_with_every_kernels_reason():
    chain = Chain(reasons=["k003_c: needs V=128, got 80", "k002_b: needs K=128, got 96", "k001_a: needs V=128, got 80"])
    found = dispatch.route("kda", chain, Problem(), Elsewhere, True)
    assert found.reason == "k003_c and 1 older: needs V=128, got 80; k002_b: needs K=128, got 96"
    assert chain.made == 0
    empty = dispatch.route("kda", Chain(), Problem("other"), Elsewhere, True)
    assert empty.reason == "this build ships no kernel for this operator"


def test_a_problem_with_kernels_is_planned_once_and_named():
    chain = Chain(steps=[Source])
    found = dispatch.route("kda", chain, Problem(), Elsewhere, True)
    assert (found.reason, found.what) == ("", "k001_mine; fla's own: bwd.a to bwd.c")
    assert dispatch.route("kda", chain, Problem(), Elsewhere, True) is found
    assert chain.made == 1


def test_a_cold_shape_declines_capture_and_a_warm_one_does_not(monkeypatch):
    monkeypatch.setattr(support, "capturing", lambda x: True)
    found = dispatch.route("kda", Chain(steps=[Source]), Problem(), Elsewhere, True)
    assert found.capture_reason(Elsewhere, True) == "CUDA graph capture of a call whose fwd and bwd has not run yet"
    assert "fwd has" in found.capture_reason(Elsewhere, False)
    found.run_forward({}, {})
    assert found.capture_reason(Elsewhere, False) == ""
    assert "whose bwd has" in found.capture_reason(Elsewhere, True)
    found.run_backward({}, {})
    assert found.capture_reason(Elsewhere, True) == ""


def test_a_backward_meets_dense_gradients():
    met = {}

    class Plan:
        @staticmethod
        def run_backward(env, meta):
            met.update(env)
            return env

    x = torch.zeros(4, 6).mT
    dispatch.Route(Plan()).run_backward({"do": x, "dht": None, "dy": x}, {})
    assert met["do"].is_contiguous()
    assert met["dht"] is None
    assert met["dy"] is x  # the convolution takes any strides


def test_packed_calls_decline_capture(monkeypatch, fla_kda):
    monkeypatch.setattr(support, "capturing", lambda x: True)
    tensors, flags = kda(sequences=(4, 8), T=12, grad=False)
    ok, reason = is_supported(**tensors, **flags)
    assert not ok
    assert "cu_seqlens under CUDA graph capture" in reason


def test_routes_are_bounded(monkeypatch):
    monkeypatch.setattr(dispatch, "_MAX_ROUTES", 3)
    for n in range(10):
        dispatch.route("kda", Chain(), Problem(n), Elsewhere, True)
        assert len(dispatch._routes) <= 3


@pytest.mark.parametrize(("capability", "reason"), [
    ((9, 0), ""),
    ((10, 3), ""),
    ((8, 9), "a GPU of compute capability 8.9: kernels are for 9.0 (Hopper) and later"),
])
def test_older_gpus_are_named(monkeypatch, capability, reason):
    monkeypatch.setattr(support, "_capability", lambda index: capability)
    assert support.device_reason(Elsewhere) == reason


def test_other_devices_are_named():
    tensors, flags = kda(grad=False, device="meta")
    ok, reason = is_supported(**tensors, **flags)
    assert not ok
    assert "device 'meta'" in reason
