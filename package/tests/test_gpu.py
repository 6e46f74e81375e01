"""On the GPU: our kernels run, hold against fp64 and fla, and fall back to fla to the bit."""
import math

import pytest
import torch
from gpu_calls import KDA, conv_call, kda_call, launched, need_kernels, triton_names
from small_inputs import conv_definition, gradients, recurrence, rms

import kernel_fun.fla
from kernel_fun import cconv
from kernel_fun import kda as ours

pytestmark = pytest.mark.gpu

KDA_BUDGET = {"o": 0.005, "ht": 0.005, "q": 0.008, "k": 0.008, "v": 0.008, "initial_state": 0.008,
              "g": 0.02, "beta": 0.02, "A_log": 0.02, "dt_bias": 0.02}
CONV_BUDGET = {"y": 0.005, "ht": 0.0, "x": 0.008, "residual": 0.005, "initial_state": 0.008,
               "weight": 0.02, "bias": 0.02}


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
    ok, what = ours.is_supported(**tensors, **flags)
    assert ok, what
    wants = recurrence(**tensors, **flags)
    expected = wants, gradients(wants, tensors)
    mine = errors(ours.chunk_kda(**tensors, **flags, output_final_state=True), tensors, expected, ("o", "ht"))
    theirs = errors(fla(**tensors, **flags, output_final_state=True), tensors, expected, ("o", "ht"))
    for key, error in mine.items():
        # The logarithm of a quotient of errors over n numbers scatters by about (n - 1) ** -0.5, and A_log has one
        # number a head: without room for three times that, which error is the larger there is a matter of the seed.
        luck = math.exp(3 * (tensors[key].numel() - 1) ** -0.5) if key in tensors else 1.0
        assert error <= max(KDA_BUDGET[key], theirs[key]), (key, error, theirs[key])
        assert error <= max(1.25 * luck * theirs[key], 1e-4), (key, error, theirs[key])


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
    """With it, what fla launches when it is called itself: kernels in the CuTe DSL would be seen here too."""
    from fla.ops.kda import chunk_kda as fla

    need_kernels("kda")
    tensors, flags = kda_call("production")

    def work(operator=ours.chunk_kda):
        gradients(operator(**tensors, **flags), tensors)

    names, flas = triton_names("kda"), launched(lambda: work(fla))
    assert names & launched(work)
    assert not names & flas
    monkeypatch.setenv("KERNEL_FUN_DISABLE", "1")
    assert launched(work) == flas


def test_conv_launches_ours_and_not_flas(monkeypatch):
    from fla.modules.convolution import causal_conv1d as fla

    need_kernels("cconv")
    tensors, flags = conv_call()

    def work():
        gradients(cconv.causal_conv1d(**tensors, **flags, activation="silu"), tensors)

    names, found = triton_names("cconv"), launched(work)
    assert names & found
    assert not any(name.startswith("causal_conv1d") for name in found)
    flas = launched(lambda: gradients(fla(**tensors, **flags, activation="silu"), tensors))
    assert not names & flas
    monkeypatch.setenv("KERNEL_FUN_CCONV_DISABLE", "1")
    assert launched(work) == flas


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
