"""On the GPU: threads, autocast, activation checkpointing, fla's decode step, and x where a projection left it."""
import threading

import pytest
import torch
import torch.nn.functional as F
from gpu_calls import FAMILIES, conv_call, launched, made, need_kernels
from small_inputs import gradients, rms
from torch.utils.checkpoint import checkpoint

from kernel_fun import cconv

pytestmark = pytest.mark.gpu


def bits(call, tensors):
    outputs = call()
    return [outputs[0].detach().clone(), *gradients(outputs, tensors).values()]


def same(a, b):
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_threads_agree(family):
    """Each with a stream of its own, the first of them compiling what the others launch."""
    tensors, call = made(family)
    results = []

    def work():
        with torch.cuda.stream(torch.cuda.Stream()):
            results.append(bits(call, tensors))
            torch.cuda.current_stream().synchronize()

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert all(same(results[0], found) for found in results)


@pytest.mark.parametrize("family", FAMILIES)
def test_autocast_changes_no_bit_and_no_dtype(family):
    tensors, call = made(family)
    want = bits(call, tensors)
    with torch.autocast("cuda", dtype=torch.float16):
        assert same(bits(call, tensors), want)
        outputs = call()
    assert same([outputs[0], *gradients(outputs, tensors).values()], want)  # the backward outside


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(family, reentrant):
    tensors, call = made(family)
    want = bits(call, tensors)
    first = next(iter(tensors.values()))  # what a re-entrant checkpoint needs to see to have gradients at all
    again = checkpoint(lambda _: call()[0], first, use_reentrant=reentrant)
    leaves = [t for t in tensors.values() if t.requires_grad]
    weights = torch.randn(again.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (again.double() * weights.to(again.device)).sum().backward()
    assert same([again, *(t.grad for t in leaves)], want)


@pytest.mark.parametrize("layout", ["sliced", "odd", "transposed"])
def test_strided_x_is_not_copied(layout):
    """Nothing is launched, in either pass, that a contiguous x does not launch; the gradient has stride 0. "odd": rows
    begin at no multiple of 4 bytes.
    """
    need_kernels("cconv")
    tensors, _ = conv_call(D=1024)
    x, weight = tensors["x"].detach(), tensors["weight"]
    if layout == "sliced":
        strided = torch.cat([x, x, x], -1)[..., 1024:2048].requires_grad_()
    elif layout == "odd":
        strided = F.pad(x, (1, 0))[..., 1:].requires_grad_()
    else:
        strided = x.mT.contiguous().mT.requires_grad_()
    assert not strided.is_contiguous()
    found = []
    for t in (x.clone().requires_grad_(), strided):
        incoming = torch.ones((), dtype=x.dtype, device="cuda").expand(x.shape)

        def work(t=t, incoming=incoming):
            y = cconv.causal_conv1d(t, weight, activation="silu")[0]
            return y, *torch.autograd.grad(y, (t, weight), incoming)

        found.append((launched(work), work()))
    (plain, want), (names, got) = found
    assert names == plain
    assert all(rms(a, b) < 1e-3 for a, b in zip(got, want, strict=True))


def test_the_decode_step_is_flas_in_place():
    from fla.modules.convolution import causal_conv1d_update as fla

    random = torch.Generator("cuda").manual_seed(0)
    x, cache, weight = (torch.randn(shape, generator=random, device="cuda") for shape in ((3, 64), (3, 64, 4), (64, 4)))
    ours, theirs = cache.clone(), cache.clone()
    y, kept = cconv.causal_conv1d_update(x, ours, weight=weight, activation="silu")
    assert kept is ours
    assert torch.equal(y, fla(x=x, cache=theirs, weight=weight, activation="silu")[0])
    assert torch.equal(ours, theirs)
    assert torch.equal(ours, torch.cat([cache[..., 1:], x[..., None]], -1))
    assert rms(y, F.silu((ours * weight).sum(-1))) < 1e-5
