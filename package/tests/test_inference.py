"""Calls without gradients keep nothing, ask no kernel for what only a backward reads, and give the same results."""
import types

import pytest
import torch
from gpu_calls import KDA, conv_call, kda_call, need_kernels
from small_inputs import conv, gradients, kda

from kernel_fun import cconv
from kernel_fun import kda as ours
from kernel_fun._common import dispatch, promoted, support
from kernel_fun._common.problem import ConvProblem, KdaProblem
from kernel_fun.cconv import chain as conv_chain
from kernel_fun.cconv import stage
from kernel_fun.kda import chain as kda_chain


def problem(gate="softplus", B=4, T=8192, H=32, varlen=False, K=128):
    raw = gate != "log"
    return KdaProblem(
        B, T, H, H, K, 128, 6 if varlen else B, B * T // 64, gate=gate,
        g_dtype=torch.bfloat16 if raw else torch.float32, lower_bound=-5.0 if gate == "safe" else None,
        l2norm=True, beta_sigmoid=True, output_final_state=True, has_A_log=raw, has_dt_bias=raw, varlen=varlen,
        arch=(9, 0),
    )  # fmt: skip


PROBLEMS = {
    "softplus": problem(), "safe": problem("safe"), "precomputed": problem("log"), "few scans": problem(B=1, T=4096),
    "packed": problem(B=1, varlen=True), "K 64": problem(K=64), "K 96": problem(K=96),
}


def wanted(step):
    return getattr(step.fn, "keywords", {}).get("wanted")


@pytest.mark.parametrize("name", PROBLEMS)
def test_no_step_is_asked_for_what_only_a_backward_reads(name):
    plan = kda_chain.make_plan(PROBLEMS[name], grad=False)
    assert (plan.saved, plan.backward) == ((), ())
    for i, step in enumerate(plan.forward):
        later = {*kda_chain.FWD_OUTPUTS}.union(*(s.reads for s in plan.forward[i + 1 :]))
        assert later.intersection(step.writes), step.source
        if wanted(step) is not None:
            assert wanted(step) == later.intersection(step.writes)
    assert plan.sources() == tuple(s.source for s in kda_chain.make_plan(PROBLEMS[name]).forward)


@pytest.mark.parametrize("gate", ["softplus", "safe", "precomputed", "packed"])
def test_a_whole_forward_in_one_step_is_asked_for_its_results_alone(gate):
    (with_grad,) = kda_chain.make_plan(PROBLEMS[gate]).forward
    (without,) = kda_chain.make_plan(PROBLEMS[gate], grad=False).forward
    kept = {"Akk", "Aqk", "beta", "k_rstd", "q_rstd"} | ({"gk"} if gate == "precomputed" else set())
    assert wanted(with_grad) == {"o", "ht"} | kept
    assert wanted(without) == {"o", "ht"}


def test_the_convolutions_plan_has_no_backward():
    plan = conv_chain.make_plan(ConvProblem(2, 64, 256, 4, 2, arch=(9, 0)), grad=False)
    assert (plan.saved, plan.backward) == ((), ())
    assert plan.sources() == ("k001_conv_strip",)


CALLS = {
    **{gate: (lambda gate=gate: kda(gate=gate, h0=True), ours.chunk_kda) for gate in ("log", "softplus", "safe")},
    "packed": (lambda: kda(sequences=(4, 0, 65), T=80, h0=True), ours.chunk_kda),
    "convolution": (lambda: conv(bias=True, h0=True), cconv.causal_conv1d),
    "packed convolution": (lambda: conv(sequences=(4, 9), h0=True), cconv.causal_conv1d),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_without_gradients_has_a_route_of_its_own_and_the_same_bits(name):
    make, operator = CALLS[name]
    tensors, flags = make()
    want = operator(**tensors, **flags, output_final_state=True)
    with torch.no_grad():
        got = operator(**tensors, **flags, output_final_state=True)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert not any(t.requires_grad for t in got)
    routes = {key[-1]: found.plan for key, found in dispatch._routes.items()}
    assert set(routes) == {True, False}
    assert (routes[False].saved, routes[False].backward) == ((), ())
    assert routes[True].saved
    gradients(want, tensors)


class Elsewhere:
    is_cpu, is_cuda, device = False, True, types.SimpleNamespace(index=0)


def test_each_of_the_two_is_captured_once_it_is_warm(monkeypatch):
    monkeypatch.setattr(support, "capturing", lambda x: True)

    class Plan:
        saved = forward = backward = ()
        sources = staticmethod(lambda: ("k001_mine",))
        run_forward = run_backward = staticmethod(lambda env, meta: env)

    steps = [types.SimpleNamespace(source="k001_mine")]
    chain = types.SimpleNamespace(shipped_for=lambda p: (steps, []), make_plan=lambda p, grad: Plan())
    plain, training = (dispatch.route("kda", chain, PROBLEMS["softplus"], Elsewhere, grad) for grad in (False, True))
    plain.run_forward({}, {})
    assert plain.capture_reason(Elsewhere, False) == ""
    assert "fwd and bwd has" in training.capture_reason(Elsewhere, True)
    training.run_backward({}, {})
    assert training.capture_reason(Elsewhere, True, forward=False) == ""
    assert "whose fwd has" in training.capture_reason(Elsewhere, True)


BACKWARD = """
FAMILY = "kda"
def run(*, q, p):
    return {}
SPANS = {"bwd.intra..bwd.cumsum": run}
WRITES = {"bwd.intra..bwd.cumsum": ("dq", "dk", "db", "dg")}
def supports(p):
    return True, ""
"""


def test_where_only_a_backward_is_served_a_call_without_gradients_goes_to_fla(monkeypatch):
    module = types.ModuleType("k002_back")
    exec(BACKWARD, module.__dict__)
    monkeypatch.setattr(promoted, "modules", lambda package: (("k002_back", module, ""), ("k001_x", None, "no DSL")))
    what = dispatch.route("kda", kda_chain, PROBLEMS["softplus"], Elsewhere, True).what
    assert what == "k002_back; fla's own: fwd.norm to fwd.out, bwd.regate to bwd.wy, bwd.gate to bwd.beta"
    found = dispatch.route("kda", kda_chain, PROBLEMS["softplus"], Elsewhere, False)
    assert found.plan is None
    assert found.reason == "k002_back: serves the backward alone; k001_x: no DSL"


def test_flas_convolution_runs_one_pass_at_a_time_without_gradients(monkeypatch):
    """As inside fla's autograd Function; the backward then finds its own route warm."""
    tensors, _ = conv(bias=True, h0=True)
    names = {"x": "x", "weight": "weight", "bias": "bias", "h0": "initial_state"}
    x, weight, bias, h0 = (tensors[name] for name in names.values())
    want = cconv.causal_conv1d(**tensors)[0]
    grads = torch.autograd.grad(want, list(tensors.values()), torch.ones_like(want))
    dispatch._routes.clear()
    with torch.no_grad():
        y, _ = stage.forward(x, weight, bias, initial_state=h0)
        dx, dw, db, _, dh0 = stage.backward(x, torch.ones_like(y), None, weight, bias, initial_state=h0)
        monkeypatch.setattr(support, "capturing", lambda x: True)
        assert stage.forward_supported(x, weight, bias, initial_state=h0)[0]
        assert stage.backward_supported(x, torch.ones_like(y), None, weight, bias, initial_state=h0)[0]
        assert not stage.backward_supported(x[:, 1:], torch.ones_like(y[:, 1:]), None, weight, bias)[0]
    assert torch.equal(y, want)
    assert all(torch.equal(a, b) for a, b in zip((dx, dw, db, dh0), grads, strict=True))


# --------------------------------------------------------------------------------------------------------- on the GPU
FEW = {"B": 1, "T": 4096, "H": 4}  # these are cut
GPU = {name: ("kda", lambda name=name: kda_call(name)) for name in KDA}
GPU |= {"many scans": ("kda", lambda: many(gate="softplus")), "many, safe": ("kda", lambda: many(gate="safe")),
        "many, precomputed": ("kda", lambda: many()), "many, packed": ("kda", lambda: many(sequences=(260,) * 10)),
        "few": ("kda", lambda: many(gate="softplus", **FEW)), "few, precomputed": ("kda", lambda: many(**FEW)),
        "few, packed": ("kda", lambda: many(gate="safe", sequences=(2048, 2100), **FEW)),
        "convolution": ("cconv", conv_call)}


def many(**made):
    """More scans than are cut into segments."""
    tensors, flags = kda(**{"B": 5, "T": 256, "H": 16, "K": 128, "V": 128, "dtype": torch.bfloat16, "device": "cuda"}
                         | made)
    return tensors, {**flags, "use_qk_l2norm_in_kernel": True}


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU)
def test_the_same_bits_with_and_without_gradients(name):
    family, make = GPU[name]
    need_kernels(family)
    tensors, flags = make()
    operator = {"kda": ours.chunk_kda, "cconv": cconv.causal_conv1d}[family]
    want = operator(**tensors, **flags, output_final_state=True)
    with torch.no_grad():
        got = operator(**tensors, **flags, output_final_state=True)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["kda", "cconv"])
def test_warmup_leaves_neither_form_cold(family, monkeypatch):
    need_kernels(family)
    if family == "kda":
        flags = {"use_qk_l2norm_in_kernel": True}
        ours.warmup(B=2, T=256, H=4, use_gate_in_kernel=True, **flags)
        tensors, more = kda(B=2, T=256, H=4, K=128, V=128, gate="softplus", dtype=torch.bfloat16, device="cuda")
        tensors["g"] = tensors["g"].detach().bfloat16().requires_grad_()
    else:
        flags = {"activation": "silu"}
        cconv.warmup(B=2, T=700, D=512)
        tensors, more = conv_call()
        tensors["weight"] = tensors["weight"].detach().float().requires_grad_()
    supported = {"kda": ours.is_supported, "cconv": cconv.is_supported}[family]
    monkeypatch.setattr(support, "capturing", lambda x: True)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            ok, what = supported(**tensors, **more, **flags)
        assert ok, what


@pytest.mark.gpu
def test_a_forward_without_gradients_needs_less_memory():
    need_kernels("kda")
    tensors, flags = many(gate="softplus")

    def peak():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        ours.chunk_kda(**tensors, **flags)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    peak()
    training = peak()
    with torch.no_grad():
        peak()
        assert peak() < training
