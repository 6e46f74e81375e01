"""How the operators live in a process: empty calls, recomputation, inference mode, threads, fork."""
import os
import subprocess
import sys
import textwrap
import threading
import warnings

import pytest
import torch
from small_inputs import conv, gradients, kda
from torch.utils.checkpoint import checkpoint

from kernel_fun._common import dispatch, support
from kernel_fun.cconv import causal_conv1d
from kernel_fun.kda import chunk_kda, is_supported


@pytest.mark.parametrize(("B", "T"), [(2, 0), (0, 5), (0, 0)])
def test_calls_without_tokens(B, T):
    tensors, flags = kda(B=B, T=T, h0=True)
    assert is_supported(**tensors, **flags) == (True, "plain torch, for a call without tokens")
    o, ht = chunk_kda(**tensors, **flags, output_final_state=True)
    assert o.shape == tensors["v"].shape
    assert torch.equal(ht, tensors["initial_state"])
    for name, grad in gradients((o, ht), tensors).items():
        assert grad.shape == tensors[name].shape
    tensors, flags = conv(B=B, T=T, h0=True, bias=True, residual=True)
    y, ht = causal_conv1d(**tensors, **flags, activation="silu", output_final_state=True)
    assert y.shape == tensors["x"].shape
    assert torch.equal(ht, tensors["initial_state"])
    grads = gradients((y, ht), tensors)
    assert torch.count_nonzero(grads["weight"]) == torch.count_nonzero(grads["bias"]) == 0


def test_packed_calls_without_tokens():
    tensors, flags = kda(sequences=(0, 0), T=4, h0=True)
    o, ht = chunk_kda(**tensors, **flags, output_final_state=True)
    assert o.shape == (1, 4, 2, 8)
    assert torch.count_nonzero(o) == 0
    assert torch.equal(ht, tensors["initial_state"])
    assert torch.count_nonzero(gradients((o,), tensors)["q"]) == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    names = ("q", "k", "v", "g", "beta")
    tensors, flags = kda()
    direct = chunk_kda(**tensors, **flags)[0]
    direct.sum().backward()
    want = [tensors[name].grad.clone() for name in names]
    for t in tensors.values():
        t.grad = None
    five = [tensors[name] for name in names]
    again = checkpoint(lambda *five: chunk_kda(*five, **flags)[0], *five, use_reentrant=reentrant)
    again.sum().backward()
    assert torch.equal(direct, again)
    assert all(torch.equal(tensors[name].grad, grad) for name, grad in zip(names, want, strict=True))


def test_gradients_accumulate_over_two_backwards():
    tensors, flags = kda()
    o, _ = chunk_kda(**tensors, **flags)
    o.sum().backward(retain_graph=True)
    once = tensors["q"].grad.clone()
    o.sum().backward()
    assert torch.equal(tensors["q"].grad, 2 * once)


@pytest.mark.parametrize(("place", "copies"), [(4096, 0), (4098, 1), (4112, 0), (4104, 1)])
def test_kernels_meet_multiples_of_16_bytes(place, copies):
    """A stand-in for a GPU's tensor at an address."""

    class There:
        is_cuda = True

        def contiguous(self):
            return self

        def data_ptr(self):
            return place

        def clone(self):
            return "a copy"

    x = There()
    assert support.dense(x) is x if not copies else support.dense(x) == "a copy"
    assert support.dense(None) is None
    y = torch.zeros(9)[1:]
    assert support.dense(y) is y  # the reference takes any address


SECOND = {"chunk_kda": (chunk_kda, kda), "causal_conv1d": (causal_conv1d, lambda: conv(residual=True))}


@pytest.mark.parametrize("name", SECOND)
@pytest.mark.parametrize("loss", ["sum", "square"])
def test_a_second_derivative_is_an_error(name, loss):
    """Also when the gradient that arrives needs none (`sum`), and whichever tensor is asked for."""
    operator, make = SECOND[name]
    tensors, flags = make()
    o = operator(**tensors, **flags)[0]
    first = next(iter(tensors.values()))
    (grad,) = torch.autograd.grad(getattr(o, loss)().sum(), first, create_graph=True)
    assert grad.requires_grad
    penalised = grad.square().sum() + o.sum()
    for t in tensors.values():
        with pytest.raises(RuntimeError, match=f"{name} has no second derivative"):
            torch.autograd.grad(penalised, t, retain_graph=True)
    with pytest.raises(RuntimeError, match=f"{name} has no second derivative"):
        penalised.backward()


@pytest.mark.parametrize("name", SECOND)
def test_a_second_derivative_for_what_weighs_the_output_is_an_error(name):
    operator, make = SECOND[name]
    tensors, flags = make()
    o = operator(**tensors, **flags)[0]
    weights = torch.ones(o.shape[-1], dtype=o.dtype, requires_grad=True)
    (grad,) = torch.autograd.grad((o * weights).sum(), next(iter(tensors.values())), create_graph=True)
    with pytest.raises(RuntimeError, match=f"{name} has no second derivative"):
        torch.autograd.grad(grad.sum(), weights)


@pytest.mark.parametrize("name", SECOND)
@pytest.mark.parametrize("how", ["plain", "reentrant", "not reentrant"])
def test_create_graph_alone_changes_no_gradient(name, how):
    """Recorded but not differentiated again: the same gradients, which an optimizer can clip and use."""
    operator, make = SECOND[name]
    found = []
    for create_graph in (False, True):
        tensors, flags = make()

        def call(*inputs, names=tuple(tensors), flags=flags):
            return operator(**dict(zip(names, inputs, strict=True)), **flags)[0]

        if how == "plain":
            o = call(*tensors.values())
        else:
            o = checkpoint(call, *tensors.values(), use_reentrant=how == "reentrant")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Using backward.. with create_graph=True")
            o.square().sum().backward(create_graph=create_graph)
        torch.nn.utils.clip_grad_norm_(tensors.values(), 1.0)
        found.append([t.grad for t in tensors.values()])
        for t in tensors.values():
            t.grad = None
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert not any(grad.requires_grad for grad in found[0])


def test_an_input_changed_before_the_backward_is_an_error():
    tensors, flags = kda()
    o, _ = chunk_kda(**tensors, **flags)
    with torch.no_grad():
        tensors["v"].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def test_inference_mode():
    tensors, flags = kda(grad=False, sequences=(5, 7), T=12)
    want = chunk_kda(**tensors, **flags)[0]
    with torch.inference_mode():
        got = chunk_kda(**{name: t.clone() for name, t in tensors.items()}, cu_seqlens=flags["cu_seqlens"].clone())[0]
    assert torch.equal(got, want)


def test_threads_agree():
    """Each thread begins with another shape, so that routes and chunk tables are made at the same time."""
    calls = [(chunk_kda, kda(sequences=(n, 9), T=20, grad=False)) for n in (1, 5, 9)]
    calls += [(causal_conv1d, conv(sequences=(n, 9), T=20)) for n in (1, 5, 9)]
    want = [operator(**tensors, **flags)[0] for operator, (tensors, flags) in calls]
    dispatch._routes.clear()
    results = []

    def work(first):
        for n in range(first, first + len(calls)):
            operator, (tensors, flags) = calls[n % len(calls)]
            fresh = {name: t.clone() for name, t in flags.items()}
            results.append(torch.equal(operator(**tensors, **fresh)[0], want[n % len(calls)]))
            results.append(torch.equal(operator(**tensors, **flags)[0], want[n % len(calls)]))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * (2 * len(calls) ** 2)


@pytest.mark.parametrize("sequences", [None, (5, 0, 15)])
@pytest.mark.parametrize(("operator", "make"), [(chunk_kda, kda), (causal_conv1d, conv)])
def test_torchs_default_device_and_dtype_change_nothing(operator, make, sequences):
    """Work is where the tensors are, whatever torch.set_default_device says; here it says a device without values."""
    def results():
        outputs = operator(**tensors, **flags, output_final_state=True)
        return [*outputs, *torch.autograd.grad(sum(t.sum() for t in outputs), list(tensors.values()))]

    tensors, flags = make(T=20, sequences=sequences, h0=True, dtype=torch.float32)
    want = results()
    flags = {name: t.clone() for name, t in flags.items()}  # whose tables are not known yet
    dispatch._routes.clear()
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    try:
        got = results()
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(got, want, strict=True))


def run(code: str):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=120)


def test_fork_after_import_and_use():
    """As a data loader's workers are forked: the child computes what the parent does."""
    done = run("""
        import os, torch
        torch.set_num_threads(1)
        from small_inputs import kda
        from kernel_fun.kda import chunk_kda
        tensors, flags = kda(T=9, grad=False)
        want = chunk_kda(**tensors, **flags)[0]
        child = os.fork()
        if child == 0:
            os._exit(0 if torch.equal(chunk_kda(**tensors, **flags)[0], want) else 7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    """)
    assert done.returncode == 0, done.stderr


def test_importing_needs_no_gpu_and_starts_nothing():
    """Both families import without triton's driver, without fla, and without touching CUDA."""
    done = run("""
        import sys
        import kernel_fun.kda, kernel_fun.cconv, torch
        assert "fla" not in sys.modules, "fla was imported"
        assert not torch.cuda.is_initialized()
    """)
    assert done.returncode == 0, done.stderr
