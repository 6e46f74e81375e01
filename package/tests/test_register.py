"""Registration with fla's dispatch: selected through fla's own names, declines with our reason, taken out again."""
import logging
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from small_inputs import conv, conv_definition, gradients, kda, recurrence, rms

backends = pytest.importorskip("fla.backends", reason="fla before 0.6 has no dispatch for whole operators")

from fla.modules.convolution import ShortConvolution, causal_conv1d_bwd, causal_conv1d_fwd  # noqa: E402
from fla.modules.convolution import causal_conv1d as fla_conv  # noqa: E402  (held before registration)
from fla.ops.kda import chunk_kda as fla_kda  # noqa: E402

import kernel_fun.fla  # noqa: E402
from kernel_fun._common import support  # noqa: E402


@pytest.fixture
def door():
    kernel_fun.fla.register()
    yield
    kernel_fun.fla.unregister()


@pytest.fixture
def default_kda(monkeypatch):
    """fla's own chunk_kda, its kernels replaced: says that it ran."""
    import importlib

    class Function:
        calls = []

        @classmethod
        def apply(cls, *args):
            cls.calls.append(args)
            return "fla", None

    monkeypatch.setattr(importlib.import_module("fla.ops.kda.chunk"), "ChunkKDAFunction", Function)
    Function.calls = []
    return Function


def test_registers_once_and_comes_out_again():
    functions = (fla_kda, causal_conv1d_fwd, causal_conv1d_bwd)
    assert not any(map(kernel_fun.fla.registered, functions))
    for _ in range(2):
        kernel_fun.fla.register()
        assert all(map(kernel_fun.fla.registered, functions))
        types = [b.backend_type for b in kernel_fun.fla._registry(fla_kda)._get_sorted_backends()]
        assert types.count("kernel_fun") == 1
    for _ in range(2):
        kernel_fun.fla.unregister()
        assert not any(map(kernel_fun.fla.registered, functions))


def test_order_among_flas_backends(door):
    order = [b.backend_type for b in kernel_fun.fla._registry(fla_kda)._get_sorted_backends()]
    assert order.index("flash_kda") < order.index("kernel_fun")
    assert backends.BaseBackend.priority > kernel_fun.fla.PRIORITY


def test_flas_chunk_kda_runs_ours(door, default_kda):
    tensors, flags = kda(gate="softplus", h0=True)
    five = [tensors.pop(name) for name in ("q", "k", "v", "g", "beta")]
    outputs = fla_kda(*five, **tensors, **flags, output_final_state=True)  # positional and keyword, as callers mix them
    assert default_kda.calls == []
    whole = {**dict(zip(("q", "k", "v", "g", "beta"), five, strict=True)), **tensors}
    expected = recurrence(**whole, **flags)
    assert all(rms(a, b) < 1e-10 for a, b in zip(outputs, expected, strict=True))
    got, want = gradients(outputs, whole), gradients(expected, whole)
    assert all(rms(got[name], want[name]) < 1e-9 for name in want)


def test_what_we_decline_runs_as_flas_own(door, default_kda, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    kernel_fun.fla._registry(fla_kda)._logged.clear()
    tensors, flags = kda(grad=False)
    monkeypatch.setenv("KERNEL_FUN_KDA_DISABLE", "1")
    assert fla_kda(**tensors, **flags) == ("fla", None)
    assert len(default_kda.calls) == 1
    assert "kernel_fun rejected: KERNEL_FUN_KDA_DISABLE is set" in caplog.text
    monkeypatch.delenv("KERNEL_FUN_KDA_DISABLE")
    assert fla_kda(**tensors, **flags)[0] != "fla"


def test_our_fallback_is_never_handed_back_to_us(door, default_kda):
    """The import door, while registered: a declined call reaches fla's default once, and does not come round again."""
    tensors, flags = kda(grad=False)
    assert kernel_fun.kda.chunk_kda(**tensors, **flags, max_num_seqs=3, use_graph=True) == ("fla", None)
    assert len(default_kda.calls) == 1
    with support.fla_only():  # and even a call that we would take
        assert fla_kda(**tensors, **flags) == ("fla", None)


def test_after_unregister_fla_is_alone(door, default_kda):
    kernel_fun.fla.unregister()
    tensors, flags = kda(grad=False)
    assert fla_kda(**tensors, **flags) == ("fla", None)


@pytest.mark.parametrize("packed", [False, True])
def test_flas_convolution_runs_our_passes(door, packed):
    sequences = (7, 1, 0, 10) if packed else None
    tensors, flags = conv(bias=True, residual=True, h0=True, sequences=sequences, T=20)
    outputs = fla_conv(**tensors, **flags, activation="silu", output_final_state=True)
    expected = conv_definition(**tensors, **flags, activation="silu")
    assert all(rms(a, b) < 1e-10 for a, b in zip(outputs, expected, strict=True))
    got, want = gradients(outputs, tensors), gradients(expected, tensors)
    for name, grad in want.items():
        assert got[name].shape == grad.shape
        assert rms(got[name], grad) < 1e-10, name


def test_flas_convolution_without_states_and_with_stride_0(door):
    tensors, flags = conv()
    y, state = fla_conv(**tensors, **flags)
    assert state is None
    want, _ = conv_definition(**tensors, **flags)
    a, b = (torch.autograd.grad(t.sum(), tensors["x"])[0] for t in (y, want))
    assert rms(a, b) < 1e-12


def test_flas_short_convolution_trains_and_decodes_here(door, caplog):
    """The module that fla's layers use, as it is: whole sequences, then single tokens, its cache in place."""
    caplog.set_level(logging.INFO)
    torch.manual_seed(0)
    module = ShortConvolution(6, 4, bias=True)
    x = torch.randn(2, 9, 6)
    whole, state = module(x, output_final_state=True)
    whole.sum().backward()
    assert all(p.grad.isfinite().all() for p in module.parameters())
    with torch.no_grad():
        _, cache = module(x[:, :5], output_final_state=True)
        first = cache
        for t in range(5, 9):
            y, cache = module(x[:, t : t + 1], cache=cache, output_final_state=True)
            assert rms(y, whole[:, t : t + 1]) < 1e-6
    assert cache is first
    assert torch.equal(cache, state)
    assert "kernel-fun cconv: no kernel runs (plain torch on CPU tensors)" in caplog.text


def test_flas_own_layer_runs_ours(door, caplog):
    """KimiDeltaAttention of flash-linear-attention, as it is; only its output norm, a GPU kernel, is stood in for."""
    kda_layer = pytest.importorskip("fla.layers.kda", reason="the extra `test` brings flash-linear-attention's layers")
    caplog.set_level(logging.INFO)
    torch.manual_seed(0)
    layer = kda_layer.KimiDeltaAttention(hidden_size=32, head_dim=16, num_heads=2)

    class Norm(torch.nn.Module):
        def forward(self, x, gate):
            return torch.nn.functional.rms_norm(x, x.shape[-1:]) * torch.sigmoid(gate)

    layer.o_norm = Norm()
    x = torch.randn(2, 70, 32, requires_grad=True)
    layer(x)[0].square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
    assert x.grad.isfinite().all()
    for operator in ("kda", "cconv"):
        assert f"kernel-fun {operator}: no kernel runs (plain torch on CPU tensors)" in caplog.text


def test_selected_under_torch_compile(door, default_kda):
    tensors, flags = kda(T=5, grad=False)

    def block(q, k, v, g, beta):
        return fla_kda(q * 1.0, k, v, g, beta)[0] + 1

    got = torch.compile(block, backend="eager")(**tensors)
    assert rms(got, recurrence(**tensors, **flags)[0] + 1) < 1e-10
    assert default_kda.calls == []


def run(code: str, **environment):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_dispatch_turned_off_is_a_clear_error():
    done = run("import kernel_fun.fla; kernel_fun.fla.register()", FLA_DISABLE_BACKEND_DISPATCH="1")
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith(
        "RuntimeError: fla was imported under FLA_DISABLE_BACKEND_DISPATCH=1"
    )


def test_an_fla_without_dispatch_is_a_clear_error():
    """As fla 0.5 is: no fla.backends."""
    done = run("""
        import sys
        sys.modules["fla.backends"] = None
        import kernel_fun.fla
        kernel_fun.fla.register()
    """)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("RuntimeError: fla-core ")
    assert "import kernel_fun.kda.chunk_kda" in last
