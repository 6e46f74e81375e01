"""Edges of the contract: an fla that moved, declined calls at both doors, views, odd inputs, one tensor alone."""
import importlib

import pytest
import torch
import torch.nn.functional as F
from small_inputs import conv, kda

import kernel_fun.fla
from kernel_fun import cconv
from kernel_fun import kda as ours
from kernel_fun._common import compat, dispatch, support
from kernel_fun.cconv import causal_conv1d
from kernel_fun.kda import autograd, chunk_kda, is_supported


# ---------------------------------------------------------------------------------------------------- of the defects
@pytest.mark.parametrize("residual", [False, True])
def test_a_declined_convolution_whose_result_is_a_view_trains(monkeypatch, residual):
    """fla's backend="cuda" returns a rearranged (and, with a residual, added to) result: a node of torch's own."""
    ops = pytest.importorskip("fla.modules.causal_conv1d.backends.cuda.ops", reason="fla before 0.6 keeps it elsewhere")

    def stand_in(x, weight, bias=None, activation=None, **_):
        return F.conv1d(F.pad(x, (weight.shape[1] - 1, 0)), weight[:, None], bias, groups=weight.shape[0])

    monkeypatch.setattr(ops, "causal_conv1d_fn_cuda", stand_in)
    tensors, _ = conv(B=1, residual=residual)
    want = causal_conv1d(**tensors)[0]
    got = causal_conv1d(**tensors, backend="cuda")[0]
    assert torch.allclose(got, want)
    assert torch.allclose(*(torch.autograd.grad(y.sum(), tensors["weight"])[0] for y in (got, want)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [{}, {"sequences": (5, 9), "T": 14}, {"B": 0}])
def test_outputs_may_be_changed_in_place(dtype, make):
    tensors, flags = kda(dtype=dtype, h0=True, **make)
    o, ht = chunk_kda(**tensors, **flags, output_final_state=True)
    want = torch.autograd.grad(3 * o.sum() + 3 * ht.sum(), list(tensors.values()), retain_graph=True)
    o.mul_(3)
    ht.mul_(3)
    got = torch.autograd.grad(o.sum() + ht.sum(), list(tensors.values()))
    assert all(torch.allclose(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(("operator", "make"), [(chunk_kda, kda), (causal_conv1d, conv)])
def test_compiled_autograd(operator, make):
    from torch._dynamo import compiled_autograd

    torch._dynamo.reset()
    tensors, flags = make(T=5)
    want = torch.autograd.grad(operator(**tensors, **flags)[0].sum(), list(tensors.values()))
    o = operator(**tensors, **flags)[0]
    with compiled_autograd._enable(torch.compile(backend="eager")):
        o.sum().backward()
    assert all(torch.equal(t.grad, g) for t, g in zip(tensors.values(), want, strict=True))


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Decisions for tensors without values, as on an H200."""
    monkeypatch.setattr(support, "device_reason", lambda x: "")
    monkeypatch.setattr(support, "arch_of", lambda x: (9, 0))
    tensors, flags = kda(K=128, V=128, dtype=torch.bfloat16, grad=False)
    return {name: t.to("meta") for name, t in tensors.items()}, flags


@pytest.fixture
def drifted(monkeypatch):
    compat._moved.cache_clear()
    monkeypatch.delattr("fla.ops.kda.gate.kda_gate_bwd")
    yield
    compat._moved.cache_clear()


def test_the_fallback_switch_is_read_at_every_call(monkeypatch, as_on_a_gpu, drifted):
    tensors, flags = as_on_a_gpu
    monkeypatch.setattr("fla.ops.kda.chunk_kda", lambda **_: ("o", None))
    monkeypatch.setenv("KERNEL_FUN_FALLBACK", "1")
    assert chunk_kda(**tensors, **flags) == ("o", None)
    monkeypatch.delenv("KERNEL_FUN_FALLBACK")
    with pytest.raises(compat.FlaDriftError, match="kda_gate_bwd is gone"):
        chunk_kda(**tensors, **flags)


def test_is_supported_returns_drift(as_on_a_gpu, drifted):
    tensors, flags = as_on_a_gpu
    ok, reason = is_supported(**tensors, **flags)
    assert not ok
    assert reason.startswith("FlaDriftError: fla-core")


@pytest.fixture
def fla_kda(monkeypatch):
    """fla's chunk_kda, which asks its backends, with a stand-in for what it runs itself."""
    pytest.importorskip("fla.backends")

    class Function:
        @staticmethod
        def apply(*args):
            return "fla", None

    monkeypatch.setattr(importlib.import_module("fla.ops.kda.chunk"), "ChunkKDAFunction", Function)
    return importlib.import_module("fla.ops.kda").chunk_kda


def test_drift_is_not_silent_at_the_other_door(fla_kda, as_on_a_gpu, drifted):
    """Either register() or the call says it by name."""
    tensors, flags = as_on_a_gpu
    try:
        with pytest.raises(compat.FlaDriftError):  # noqa: PT012 (either may say it)
            kernel_fun.fla.register()
            fla_kda(**tensors, **flags)
    finally:
        kernel_fun.fla.unregister()


@pytest.mark.parametrize(("family", "where"), [("kda", "fla.ops.kda.chunk_kda"),
                                               ("cconv", "fla.modules.convolution.causal_conv1d")])
def test_a_renamed_keyword_beside_var_keywords_is_named(monkeypatch, family, where):
    def moved(query, **kwargs):
        raise AssertionError("never called")

    monkeypatch.setattr(where, moved)
    assert any("no longer takes" in line for line in compat.drift(family))


def test_a_constant_that_is_gone_is_named(monkeypatch):
    monkeypatch.delattr("fla.ops.utils.constant.RCP_LN2")
    assert any("RCP_LN2 is gone" in line for line in compat.drift("kda"))


def test_a_registration_that_fails_leaves_nothing_behind(monkeypatch):
    import inspect

    backends = pytest.importorskip("fla.backends")
    *first, last = kernel_fun.fla._functions()
    monkeypatch.delitem(backends._function_registries, inspect.unwrap(last))
    with pytest.raises(RuntimeError, match="keeps no registry"):
        kernel_fun.fla.register()
    try:
        assert not any(map(kernel_fun.fla.registered, first))
    finally:
        for f in first:
            kernel_fun.fla._registry(f)._backends.pop("kernel_fun", None)


def test_a_dispatch_that_has_moved_is_a_clear_error(monkeypatch):
    pytest.importorskip("fla.backends")
    monkeypatch.delattr("fla.backends.BaseBackend")
    with pytest.raises(RuntimeError, match=r"import kernel_fun\.kda\.chunk_kda"):
        kernel_fun.fla.register()


def test_every_declined_call_shows_at_the_other_door(fla_kda, lines):
    """Under KERNEL_FUN_DEBUG, and once per reason without it."""
    tensors, flags = kda(grad=False)
    kernel_fun.fla.register()
    try:
        fla_kda(**tensors, **flags, use_graph=True)
        fla_kda(**tensors, **flags, surprise=1)
    finally:
        kernel_fun.fla.unregister()
    said = [text for _, text in lines()]
    assert any("use_graph=True" in text for text in said)
    assert any("'surprise' is not known here" in text for text in said)


@pytest.mark.parametrize("call", [
    lambda: cconv.is_supported(torch.zeros(2, 20, 1), torch.zeros(1, 4), residual=torch.zeros(2, 20)),
    lambda: cconv.is_supported(torch.zeros(1, 20, 6), torch.zeros(6, 4), cu_seqlens=torch.tensor([0, 2**50])),
    lambda: is_supported(**kda(grad=False)[0], chunk_size=torch.zeros(2)),
])
def test_is_supported_never_raises(call):
    ok, reason = call()
    assert ok is False
    assert "Error: " in reason


def test_an_end_beyond_the_tokens_is_said_before_tables_are_made():
    with pytest.raises(ValueError, match="but x has T=20 tokens"):
        causal_conv1d(torch.zeros(1, 20, 6), torch.zeros(6, 4), cu_seqlens=torch.tensor([0, 2**50]))


def test_a_host_copy_of_another_kind_is_refused_whatever_was_asked_before():
    tensors, flags = conv(sequences=(8, 12), T=20)
    causal_conv1d(**tensors, **flags)
    with pytest.raises(ValueError, match="cu_seqlens"):
        causal_conv1d(**tensors, **flags, cu_seqlens_cpu=torch.tensor([0.0, 8.9, 20.0]))
    flags["cu_seqlens"] = flags["cu_seqlens"].int()
    causal_conv1d(**tensors, **flags)
    with pytest.raises(ValueError, match="cu_seqlens"):
        causal_conv1d(**tensors, **flags, cu_seqlens_cpu=torch.tensor([0, 8 + 2**32, 20]))


# ------------------------------------------------------------------------------- of lines that no test could fail for
@pytest.mark.parametrize("name", ["k", "v", "g", "beta", "A_log", "dt_bias", "initial_state"])
def test_each_tensor_must_be_on_qs_device(name):
    tensors, flags = kda(gate="softplus", h0=True, grad=False)
    with pytest.raises(ValueError, match=f"{name} is on meta, q on cpu"):
        chunk_kda(**{**tensors, name: tensors[name].to("meta")}, **flags)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_each_of_q_k_v_must_have_the_dtype(name):
    tensors, flags = kda(dtype=torch.float32, grad=False)
    with pytest.raises(ValueError, match="q, k, v must share one floating dtype"):
        chunk_kda(**{**tensors, name: tensors[name].half()}, **flags)


@pytest.mark.parametrize("name", ["g", "beta"])
def test_gates_are_floating_point(name):
    tensors, flags = kda(grad=False)
    with pytest.raises(ValueError, match="g and beta must be floating point"):
        chunk_kda(**{**tensors, name: tensors[name].long()}, **flags)


@pytest.mark.parametrize("name", ["x", "weight", "bias", "residual", "initial_state"])
def test_one_input_of_the_convolution_alone_wants_a_gradient(name):
    """A first layer whose x needs none; a frozen convolution with a bias that is trained."""
    tensors, _ = conv(bias=True, residual=True, h0=True)
    want = torch.autograd.grad(sum(t.sum() for t in causal_conv1d(**tensors, output_final_state=True)), tensors[name])
    alone = {n: t.detach().requires_grad_(n == name) for n, t in tensors.items()}
    outputs = causal_conv1d(**alone, output_final_state=True)
    assert torch.equal(torch.autograd.grad(sum(t.sum() for t in outputs), alone[name])[0], want[0])


def test_debug_repeats_what_goes_to_fla(monkeypatch, lines):
    monkeypatch.setenv("KERNEL_FUN_DEBUG", "1")
    monkeypatch.setattr("fla.ops.kda.chunk_kda", lambda **_: ("o", None))
    for _ in range(3):
        chunk_kda(**kda(grad=False)[0], use_graph=True)
    assert sum("falling back to fla: use_graph=True" in text for _, text in lines()) == 3


def test_a_declined_convolution_is_logged(monkeypatch, lines):
    monkeypatch.setattr("fla.modules.convolution.causal_conv1d", lambda **_: ("y", None))
    causal_conv1d(**conv()[0], backend="mix")
    assert lines() == [
        ("WARNING", "kernel-fun cconv: falling back to fla: backend='mix' (fla cannot run on CPU tensors)")
    ]


@pytest.mark.parametrize("name", ["causal_conv1d_fwd", "causal_conv1d_bwd", "causal_conv1d_update"])
def test_no_pass_of_a_declined_convolution_comes_back(name):
    pytest.importorskip("fla.backends")
    kernel_fun.fla.register()
    try:
        f = next(f for f in kernel_fun.fla._functions() if f.__name__ == name)
        backend = kernel_fun.fla._registry(f)._backends["kernel_fun"]
        x, w, cache = torch.zeros(3, 1, 6), torch.zeros(6, 4), torch.zeros(3, 6, 4)
        given = {"causal_conv1d_fwd": {"x": x, "weight": w}, "causal_conv1d_bwd": {"x": x, "dy": x, "weight": w},
                 "causal_conv1d_update": {"x": x, "cache": cache, "weight": w}}[name]
        assert getattr(backend, f"{name}_verifier")(**given)[0]
        with support.fla_only():
            assert getattr(backend, f"{name}_verifier")(**given) == (False, "called by kernel_fun itself")
    finally:
        kernel_fun.fla.unregister()


def test_kernels_meet_dense_inputs(monkeypatch):
    """Whatever the caller's strides, 0 included; the reference would not care."""
    met, apply = [], autograd.apply
    monkeypatch.setattr(autograd, "apply", lambda *args: met.append(args[2:10]) or apply(*args))
    tensors, flags = kda(gate="softplus", h0=True, grad=False)
    want = chunk_kda(**tensors, **flags)[0]
    strided = {n: torch.stack([t, t], -1)[..., 0] for n, t in tensors.items()}
    assert not any(t.is_contiguous() for t in strided.values())
    assert torch.equal(chunk_kda(**strided, **flags)[0], want)
    assert all(t.is_contiguous() for t in met[-1])
    chunk_kda(**{**tensors, "beta": torch.ones((), dtype=torch.float64).expand(2, 70, 2)}, **flags)
    assert all(t.is_contiguous() for t in met[-1])


def test_a_node_that_is_flas_is_forgotten_with_its_graph(monkeypatch):
    class Convolution(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, dy):
            return dy * 2

    monkeypatch.setattr("fla.modules.convolution.causal_conv1d", lambda x, **_: (Convolution.apply(x), None))
    before = len(support._flas)
    y = causal_conv1d(**conv()[0], backend="mix")[0]
    assert len(support._flas) == before + 1
    del y
    assert len(support._flas) == before


def test_a_route_belongs_to_one_device(monkeypatch):
    class Chain:
        def shipped_for(self, p):
            return [], ["no"]

    class P(tuple):
        B = T = 1

    class There:
        is_cpu = False

        def __init__(self, index):
            self.device = torch.device("cuda", index)

    monkeypatch.setattr(compat, "reason", lambda family: "")
    a, b = (dispatch.route("kda", Chain(), P(), There(n), True) for n in (0, 1))
    assert a is not b


@pytest.mark.parametrize("how", ["vmap", "grad", "jvp", "dual"])
@pytest.mark.parametrize(("operator", "make"), [(chunk_kda, kda), (causal_conv1d, conv)])
def test_functional_transforms_are_an_error_and_never_a_wrong_number(operator, make, how):
    tensors, _ = make(T=5)
    first, *rest = (t.detach() for t in tensors.values())

    def f(x):
        return operator(x, *rest)[0]

    def dual():
        with torch.autograd.forward_ad.dual_level():
            f(torch.autograd.forward_ad.make_dual(first, first))

    calls = {
        "vmap": lambda: torch.func.vmap(f)(torch.stack([first, first])),
        "grad": lambda: torch.func.grad(lambda x: f(x).sum())(first),
        "jvp": lambda: torch.func.jvp(f, (first,), (first,)),
        "dual": dual,
    }
    with pytest.raises((RuntimeError, NotImplementedError), match=r"setup_context|jvp"):
        calls[how]()


def test_modules_that_hold_the_operators_are_copied_and_pickled():
    import copy
    import pickle

    for operator in (chunk_kda, is_supported, causal_conv1d, cconv.causal_conv1d_update, ours.warmup, cconv.warmup):
        assert pickle.loads(pickle.dumps(operator)) is operator
        assert copy.deepcopy(operator) is operator


def test_saved_tensor_hooks_keep_the_second_derivative_an_error():
    tensors, flags = kda(T=5)
    with torch.autograd.graph.save_on_cpu():
        o, _ = chunk_kda(**tensors, **flags)
    (grad,) = torch.autograd.grad(o.sum(), tensors["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        grad.sum().backward()


@pytest.mark.parametrize("name", ["weight", "bias", "initial_state", "x"])
def test_the_convolutions_inputs_changed_before_the_backward_are_an_error(name):
    tensors, _ = conv(bias=True, h0=True)
    y, _ = causal_conv1d(**tensors, activation="silu")
    with torch.no_grad():
        tensors[name].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_cu_seqlens_changed_between_the_passes_changes_no_gradient():
    tensors, flags = kda(sequences=(5, 9), T=20)
    o, _ = chunk_kda(**tensors, **flags)
    want = torch.autograd.grad(o.sum(), list(tensors.values()), retain_graph=True)
    flags["cu_seqlens"][1] = 12
    got = torch.autograd.grad(o.sum(), list(tensors.values()))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_warmup_leaves_the_random_state_alone_on_a_cpu_too():
    before = torch.get_rng_state()
    for function, sizes in ((ours.warmup, {"H": 1, "K": 16, "V": 8}), (cconv.warmup, {"B": 1, "D": 6})):
        with pytest.raises(RuntimeError, match="plain torch on CPU tensors"):
            function(T=4, device="cpu", **sizes)
    assert torch.equal(before, torch.get_rng_state())


def test_unregister_takes_every_function_out():
    pytest.importorskip("fla.backends")
    kernel_fun.fla.register()
    assert all(map(kernel_fun.fla.registered, kernel_fun.fla._functions()))
    kernel_fun.fla.unregister()
    assert not any(map(kernel_fun.fla.registered, kernel_fun.fla._functions()))


def test_the_convolutions_small_inputs_reach_the_kernels_dense(monkeypatch):
    from kernel_fun.cconv import autograd as conv_autograd

    met, apply = [], conv_autograd.apply
    monkeypatch.setattr(conv_autograd, "apply", lambda *args: met.append(args[3:7]) or apply(*args))
    tensors, _ = conv(bias=True, residual=True, h0=True)
    strided = {n: torch.stack([t.detach()] * 2, -1)[..., 0] for n, t in tensors.items()}
    assert torch.equal(causal_conv1d(**strided)[0], causal_conv1d(**tensors)[0])
    assert all(t.is_contiguous() for t in met[0])


def test_a_cold_call_under_capture_is_declined_by_the_operators(monkeypatch, as_on_a_gpu):
    tensors, flags = as_on_a_gpu
    monkeypatch.setattr(support, "capturing", lambda x: True)
    assert is_supported(**tensors, **flags) == (False, "CUDA graph capture of a call whose fwd has not run yet")
    x, weight = torch.zeros(2, 20, 8, dtype=torch.bfloat16, device="meta"), torch.zeros(8, 4, device="meta")
    assert cconv.is_supported(x, weight) == (False, "CUDA graph capture of a call whose fwd has not run yet")


def test_the_registered_backward_asks_whose_forward_it_was(monkeypatch):
    pytest.importorskip("fla.backends")
    kernel_fun.fla.register()
    try:
        f = next(f for f in kernel_fun.fla._functions() if f.__name__ == "causal_conv1d_bwd")
        verifier = kernel_fun.fla._registry(f)._backends["kernel_fun"].causal_conv1d_bwd_verifier
        x, w = torch.zeros(3, 1, 6), torch.zeros(6, 4)
        assert verifier(x=x, dy=x, weight=w)[0]
        monkeypatch.setattr(kernel_fun.fla, "inside_flas_backward", lambda: True)
        assert verifier(x=x, dy=x, weight=w) == (False, "the backward of a call that went to fla")
    finally:
        kernel_fun.fla.unregister()


def test_an_amd_gpu_is_named(monkeypatch):
    class There:
        is_cpu, is_cuda, device = False, True, torch.device("cuda", 0)

    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert support.device_reason(There) == "device 'cuda' (AMD): kernels are for NVIDIA GPUs"
