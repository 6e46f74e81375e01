"""On the GPU: runs repeat to the bit, are captured, keep nothing, work on any device and stream, and compile."""
import importlib

import pytest
import torch
from gpu_calls import FAMILIES, conv_call, kda_call, made, need_kernels
from small_inputs import gradients, rms

from kernel_fun import cconv
from kernel_fun import kda as ours
from kernel_fun._common import support

pytestmark = pytest.mark.gpu


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
    side.wait_stream(torch.cuda.current_stream())
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


# packed sequences are declined under capture; where the scans of "long" begin depends on the gates
@pytest.mark.parametrize("grad", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("name", ["production", "kimi", "gva_state", "long", "conv"])
def test_a_captured_call_replays_fresh_data_to_the_bit(name, grad):
    need_kernels("cconv" if name == "conv" else "kda")
    operator = cconv.causal_conv1d if name == "conv" else ours.chunk_kda

    def made_of(seed):
        return conv_call(bias=True, h0=True, seed=seed) if name == "conv" else kda_call(name, seed=seed)

    tensors, flags = made_of(0)
    leaves, incoming = list(tensors.values()), []

    def step():
        with torch.set_grad_enabled(grad):
            results = operator(**tensors, **flags, output_final_state=True)
        found = torch.autograd.grad(results, leaves, incoming, allow_unused=True) if grad else ()
        return [*results, *(t for t in found if t is not None)]

    with torch.no_grad():
        incoming += [torch.randn_like(t) for t in operator(**tensors, **flags, output_final_state=True)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        first = step()[0].detach().clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed, weak in ((1, False), (2, True)):
        fresh, _ = made_of(seed)
        with torch.no_grad():
            if weak and name != "conv":  # next to no decay
                fresh["g"] = fresh["g"] - 12 if "A_log" in fresh else fresh["g"] * 0.01
            for key, t in tensors.items():
                t.copy_(fresh[key])
            for t in incoming:
                t.normal_()
        graph.replay()
        replayed = [t.detach().clone() for t in captured]
        eager = [t.detach() for t in step()]
        assert not torch.equal(replayed[0], first)
        assert all(torch.equal(a, b) for a, b in zip(replayed, eager, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cold_call_under_capture_is_declined(family, monkeypatch):
    make, _, flags = FAMILIES[family]
    need_kernels(family)
    tensors, more = make()
    monkeypatch.setattr(support, "capturing", lambda x: True)
    ok, reason = importlib.import_module(f"kernel_fun.{family}").is_supported(**tensors, **more, **flags)
    assert not ok
    assert reason == "CUDA graph capture of a call whose fwd and bwd has not run yet"


@pytest.mark.parametrize("name", ["production", "gva_state", "packed"])
def test_views_that_begin_anywhere_give_the_same_bits(name):
    """Each tensor, and the gradient that arrives, one element into a buffer of its own."""
    need_kernels("kda")
    tensors, flags = kda_call(name)

    def moved(t):
        return torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)[1:].view(t.shape).copy_(t.detach())

    def run(inputs, incoming):
        leaves = [t for t in inputs.values() if t.requires_grad]
        o = ours.chunk_kda(**inputs, **flags)[0]
        return [o, *torch.autograd.grad(o, leaves, incoming(o))]

    want = run(tensors, torch.ones_like)
    odd = {name: moved(t).requires_grad_(t.requires_grad) for name, t in tensors.items()}
    assert all(t.data_ptr() % 16 for t in odd.values())
    got = run(odd, lambda o: moved(torch.ones_like(o)))
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def test_packed_sequences_in_int32_give_the_same_bits():
    need_kernels("kda")
    tensors, flags = kda_call("packed")
    want = bits(lambda: ours.chunk_kda(**tensors, **flags), tensors)
    flags["cu_seqlens"] = flags["cu_seqlens"].int()
    assert ours.is_supported(**tensors, **flags)[0]
    got = bits(lambda: ours.chunk_kda(**tensors, **flags), tensors)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_kept_between_calls(family):
    """Little after the first call, which may make what all share, and nothing more with each."""
    tensors, call = made(family)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    bits(call, tensors)
    torch.cuda.synchronize()
    once = torch.cuda.memory_allocated()
    assert once - before < 16 << 20
    for _ in range(8):
        bits(call, tensors)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - once < 1 << 20


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
    assert ours.warmup(T=512, initial_state=True, output_final_state=True, **flags) > 0
    assert cconv.warmup(B=2, T=512, D=(512, 1024)) > 0
    with pytest.raises(RuntimeError, match="warmup compiled nothing: chunk_size=32"):
        ours.warmup(chunk_size=32)
