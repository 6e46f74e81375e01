"""On the GPU: our kernels run, hold against fp64 and fla, fall back to fla to the bit, repeat, and keep nothing."""
import importlib

import pytest
import torch
from small_inputs import conv, conv_definition, gradients, kda, recurrence, rms

import kernel_fun.fla
from kernel_fun import cconv
from kernel_fun import kda as ours
from kernel_fun._common import promoted, support

pytestmark = pytest.mark.gpu

# name -> arguments of inputs.kda and flags of the call
KDA = {
    "log": ({}, {}),
    "production": ({"gate": "softplus", "V": 256}, {"use_qk_l2norm_in_kernel": True}),
    "kimi": ({"gate": "safe"}, {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}),
    "gva_state": ({"HV": 8, "h0": True}, {}),
    "ragged": ({"T": 300, "h0": True}, {}),
    "packed": ({"sequences": (130, 1, 64, 200), "T": 420, "h0": True}, {}),
    "state_v_first": ({"gate": "softplus"}, {"state_v_first": True, "use_qk_l2norm_in_kernel": True}),
}
KDA_BUDGET = {"o": 0.005, "ht": 0.005, "q": 0.008, "k": 0.008, "v": 0.008, "initial_state": 0.008,
              "g": 0.02, "beta": 0.02, "A_log": 0.02, "dt_bias": 0.02}
CONV_BUDGET = {"y": 0.005, "ht": 0.0, "x": 0.008, "residual": 0.005, "initial_state": 0.008,
               "weight": 0.02, "bias": 0.02}


def kda_call(name):
    made, flags = KDA[name]
    shape = {"B": 2, "T": 256, "H": 4, "K": 128, "V": 128}
    tensors, more = kda(**{**shape, "dtype": torch.bfloat16, "device": "cuda", **made})
    return tensors, {**more, **flags}


def conv_call(**made):
    return conv(**{"B": 2, "T": 700, "D": 512, "dtype": torch.bfloat16, "device": "cuda", **made})


def need_kernels(family):
    if not any(module is not None for _, module, _ in promoted.modules(f"kernel_fun.{family}")):
        pytest.skip(f"no promoted {family} kernel that imports here")


def triton_names(family):
    """Names of all Triton kernels in the promoted modules of a family."""
    from triton.runtime.jit import JITFunction

    modules = [module for _, module, _ in promoted.modules(f"kernel_fun.{family}") if module is not None]
    functions = [f for module in modules for f in vars(module).values() if isinstance(f, JITFunction)]
    return {f.fn.__name__ for f in functions}


def launched(work):
    """Names of the device kernels that `work` launches; it has run once before."""
    work()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    return {e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA}


def errors(outputs, tensors, expected, names):
    """Relative RMS error per output and gradient against (outputs, gradients) of the definition."""
    wants, want_grads = expected
    found = {name: rms(got, want) for name, got, want in zip(names, outputs, wants, strict=True) if got is not None}
    grads = gradients(outputs, tensors)
    return {**found, **{name: rms(grads[name], grad) for name, grad in want_grads.items()}}


# ----------------------------------------------------------------------------------------------------------- numerics
@pytest.mark.parametrize("name", KDA)
def test_kda_against_fp64_and_fla(name):
    from fla.ops.kda import chunk_kda as fla

    need_kernels("kda")
    tensors, flags = kda_call(name)
    if name == "production":
        ok, what = ours.is_supported(**tensors, **flags)
        assert ok, what
    wants = recurrence(**tensors, **flags)
    expected = wants, gradients(wants, tensors)
    mine = errors(ours.chunk_kda(**tensors, **flags, output_final_state=True), tensors, expected, ("o", "ht"))
    theirs = errors(fla(**tensors, **flags, output_final_state=True), tensors, expected, ("o", "ht"))
    for key, error in mine.items():
        assert error <= max(KDA_BUDGET[key], theirs[key]), (key, error, theirs[key])
        assert error <= max(1.25 * theirs[key], 1e-4), (key, error, theirs[key])


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("made", [
    {}, {"W": 2}, {"W": 3, "T": 1000}, {"bias": True, "residual": True}, {"h0": True}, {"T": 3, "h0": True},
    {"sequences": (100, 0, 1, 2, 300), "T": 410, "h0": True, "bias": True, "residual": True},
])
def test_conv_against_fp64(made, activation):
    need_kernels("cconv")
    tensors, flags = conv_call(**made)
    flags["activation"] = activation
    ok, what = cconv.is_supported(**tensors, **flags)
    assert ok, what
    wants = conv_definition(**tensors, **flags)
    expected = wants, gradients(wants, tensors)
    outputs = cconv.causal_conv1d(**tensors, **flags, output_final_state=True)
    for key, error in errors(outputs, tensors, expected, ("y", "ht")).items():
        assert error <= CONV_BUDGET[key], (key, error)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_conv_holds_flas_own_tolerance(dtype):
    need_kernels("cconv")
    tensors, flags = conv_call(dtype=dtype, bias=True, residual=True)
    wants = conv_definition(**tensors, **flags, activation="silu")
    outputs = cconv.causal_conv1d(**tensors, **flags, activation="silu")
    expected = (wants[0], None), gradients(wants[:1], tensors)
    assert all(error < 1e-3 for error in errors(outputs, tensors, expected, ("y", "ht")).values())


# ---------------------------------------------------------------------------------------------------- what is launched
def test_kda_launches_ours_and_with_the_switch_nothing_of_ours(monkeypatch):
    need_kernels("kda")
    tensors, flags = kda_call("production")

    def work():
        gradients(ours.chunk_kda(**tensors, **flags), tensors)

    names = triton_names("kda")
    assert names & launched(work)
    monkeypatch.setenv("KERNEL_FUN_DISABLE", "1")
    assert not names & launched(work)


def test_conv_launches_ours_and_not_flas(monkeypatch):
    need_kernels("cconv")
    tensors, flags = conv_call()

    def work():
        gradients(cconv.causal_conv1d(**tensors, **flags, activation="silu"), tensors)

    names, found = triton_names("cconv"), launched(work)
    assert names & found
    assert not any(name.startswith("causal_conv1d") for name in found)
    monkeypatch.setenv("KERNEL_FUN_CCONV_DISABLE", "1")
    assert not names & launched(work)


def test_registered_flas_own_functions_launch_ours():
    from fla.modules.convolution import causal_conv1d as fla_conv
    from fla.ops.kda import chunk_kda as fla_kda

    pytest.importorskip("fla.backends", reason="fla before 0.6 has no dispatch for whole operators")
    need_kernels("kda")
    need_kernels("cconv")
    k, kf = kda_call("production")
    c, cf = conv_call()
    kernel_fun.fla.register()
    try:
        assert triton_names("kda") & launched(lambda: gradients(fla_kda(**k, **kf), k))
        assert triton_names("cconv") & launched(lambda: gradients(fla_conv(**c, **cf, activation="silu"), c))
    finally:
        kernel_fun.fla.unregister()


def test_flas_own_layer_launches_ours():
    kda_layer = pytest.importorskip("fla.layers.kda", reason="the extra `test` brings flash-linear-attention's layers")
    need_kernels("kda")
    need_kernels("cconv")
    torch.manual_seed(0)
    layer = kda_layer.KimiDeltaAttention(hidden_size=512, head_dim=128, num_heads=4).to("cuda", torch.bfloat16)
    x = torch.randn(2, 512, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def work():
        torch.autograd.grad(layer(x)[0].float().sum(), [x, *layer.parameters()])

    kernel_fun.fla.register()
    try:
        found = launched(work)
    finally:
        kernel_fun.fla.unregister()
    assert triton_names("kda") & found
    assert triton_names("cconv") & found
    assert not (triton_names("kda") | triton_names("cconv")) & launched(work)


# ------------------------------------------------------------------------------------------------------------ fallback
@pytest.mark.parametrize("how", ["switch", "chunk_size", "disable_recompute"])
def test_kda_fallback_is_fla_to_the_bit(monkeypatch, how):
    from fla.ops.kda import chunk_kda as fla

    tensors, flags = kda_call("ragged")
    flags.update({"chunk_size": 32} if how == "chunk_size" else {"disable_recompute": True} if how != "switch" else {})
    if how == "switch":
        monkeypatch.setenv("KERNEL_FUN_KDA_DISABLE", "1")
    assert not ours.is_supported(**tensors, **flags)[0]
    results = []
    for operator in (fla, ours.chunk_kda):
        outputs = operator(**tensors, **flags, output_final_state=True)
        results.append([*outputs, *gradients(outputs, tensors).values()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_conv_fallback_is_fla_to_the_bit():
    from fla.modules.convolution import causal_conv1d as fla

    tensors, flags = conv_call(W=5, bias=True)  # a width that no kernel of ours takes
    ok, reason = cconv.is_supported(**tensors, **flags)
    assert not ok, reason
    results = []
    for operator in (fla, cconv.causal_conv1d):
        outputs = operator(**tensors, **flags, activation="silu")
        results.append([outputs[0], *gradients(outputs, tensors).values()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# ------------------------------------------------------------------------------------------------------------- runtime
FAMILIES = {
    "kda": (lambda: kda_call("production"), ours.chunk_kda, {}),
    "cconv": (conv_call, cconv.causal_conv1d, {"activation": "silu"}),
}


def made(family):
    need_kernels(family)
    make, operator, flags = FAMILIES[family]
    tensors, more = make()
    ok, what = importlib.import_module(f"kernel_fun.{family}").is_supported(**tensors, **more, **flags)
    assert ok, what
    return tensors, lambda: operator(**tensors, **more, **flags)


def bits(call, tensors):
    outputs = call()
    return [outputs[0].detach().clone(), *gradients(outputs, tensors).values()]


@pytest.mark.parametrize("family", FAMILIES)
def test_runs_repeat_to_the_bit_also_on_a_side_stream(family):
    tensors, call = made(family)
    first = bits(call, tensors)
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            again = bits(call, tensors)
        stream.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_warm_call_is_captured_and_replays_to_the_bit(family):
    tensors, call = made(family)
    want = bits(call, tensors)
    leaves = [t for t in tensors.values() if t.requires_grad]
    incoming = torch.ones_like(want[0])

    def step():
        out = call()[0]
        return [out, *torch.autograd.grad(out, leaves, incoming)]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        eager = [t.clone() for t in step()]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(eager, captured, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cold_call_under_capture_is_declined(family, monkeypatch):
    make, _, flags = FAMILIES[family]
    need_kernels(family)
    tensors, more = make()
    monkeypatch.setattr(support, "capturing", lambda x: True)
    ok, reason = importlib.import_module(f"kernel_fun.{family}").is_supported(**tensors, **more, **flags)
    assert not ok
    assert reason == "CUDA graph capture of a call whose fwd and bwd has not run yet"


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_kept_between_calls(family):
    tensors, call = made(family)
    bits(call, tensors)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(8):
        bits(call, tensors)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < 1 << 20


@pytest.mark.parametrize("family", FAMILIES)
def test_peak_memory_is_at_most_flas(family, monkeypatch):
    tensors, call = made(family)

    def peak():
        bits(call, tensors)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        bits(call, tensors)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    mine = peak()
    monkeypatch.setenv("KERNEL_FUN_DISABLE", "1")
    assert mine <= peak() + (1 << 20)


@pytest.mark.parametrize("family", FAMILIES)
def test_two_calls_share_no_memory(family):
    _, call = made(family)
    first = call()[0]
    kept = first.detach().clone()
    second = call()[0]
    second.detach().zero_()
    assert torch.equal(first, kept)


@pytest.mark.parametrize("family", FAMILIES)
def test_another_gpu_than_the_current_one(family):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    tensors, call = made(family)
    want = bits(call, tensors)
    make, operator, flags = FAMILIES[family]
    _, more = make()
    elsewhere = {name: t.detach().to("cuda:1").requires_grad_() for name, t in tensors.items()}
    got = bits(lambda: operator(**elsewhere, **more, **flags), elsewhere)
    assert torch.cuda.current_device() == 0
    assert all(torch.equal(a, b.to("cuda:0")) for a, b in zip(want, got, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_with_dynamic_shapes(family):
    make, operator, flags = FAMILIES[family]
    need_kernels(family)
    tensors, more = make()
    positional = {"kda": ("q", "k", "v", "g", "beta"), "cconv": ("x",)}[family]
    rest = {name: t for name, t in tensors.items() if name not in positional}

    def block(*inputs):
        inputs = [t * 1.0 for t in inputs]
        return operator(*inputs, **rest, **more, **flags)[0] * 2.0

    compiled = torch.compile(block, dynamic=True)
    for T in (256, 192):
        inputs = [tensors[name][:, :T].detach().requires_grad_() for name in positional]
        got, want = compiled(*inputs), block(*inputs)
        assert torch.equal(got, want)
        for a, b in zip(torch.autograd.grad(got.sum(), inputs), torch.autograd.grad(want.sum(), inputs), strict=True):
            assert rms(a, b) < 1e-6


def test_warmup_compiles_and_says_how_long():
    need_kernels("kda")
    need_kernels("cconv")
    flags = {"use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True}
    assert ours.warmup(T=512, V=256, dtype=torch.bfloat16, **flags) > 0
    assert cconv.warmup(B=2, T=512, D=(512, 1024)) > 0
    with pytest.raises(RuntimeError, match="warmup compiled nothing: chunk_size=32"):
        ours.warmup(chunk_size=32)
