"""KERNEL_FUN_KDA_MIN_CTAS: moves the smallest grid that is dispatched here, and nothing else; what warmup refuses."""
import pytest
import torch
from small_inputs import conv, kda

from kernel_fun import cconv
from kernel_fun._common import dispatch
from kernel_fun.kda import is_supported, warmup


@pytest.fixture(autouse=True)
def problems(monkeypatch):
    """Routes as on a GPU whose kernels serve every problem; the problems that were asked for."""
    asked = []

    def route(family, chain, p, x, grad):
        asked.append(p)
        return dispatch.Route(what="k001_mine")

    monkeypatch.setattr("kernel_fun.kda.ops.route", route)
    return asked


def test_the_dispatch_floor_moves_with_its_switch_alone(monkeypatch, lines):
    """8 CTAs: 2 sequences, 2 heads, V 80 in 2 tiles. Without the switch no grid is too small."""
    tensors, flags = kda(T=5, V=80, grad=False)
    assert is_supported(**tensors, **flags) == (True, "k001_mine")
    assert lines() == []
    for floor in ("0", "8"):
        monkeypatch.setenv("KERNEL_FUN_KDA_MIN_CTAS", floor)
        assert is_supported(**tensors, **flags) == (True, "k001_mine")
    monkeypatch.setenv("KERNEL_FUN_KDA_MIN_CTAS", "9")
    for _ in range(2):
        ok, reason = is_supported(**tensors, **flags)
        assert (ok, reason) == (False, "a grid of 8 CTAs, below the 9 of KERNEL_FUN_KDA_MIN_CTAS")
    assert lines() == [
        ("INFO", f"kernel-fun kda: calls with a scan grid below {floor} CTAs go to fla "
                 "(KERNEL_FUN_KDA_MIN_CTAS; without it none do)") for floor in (0, 8, 9)
    ]
    assert cconv.is_supported(**conv()[0])[0]


def test_packed_sequences_count_for_the_floor(monkeypatch):
    tensors, flags = kda(sequences=(4, 0, 8), T=12, grad=False)
    monkeypatch.setenv("KERNEL_FUN_KDA_MIN_CTAS", "7")
    assert is_supported(**tensors, **flags) == (False, "a grid of 6 CTAs, below the 7 of KERNEL_FUN_KDA_MIN_CTAS")


def test_a_floor_that_is_no_number_is_ignored(monkeypatch, lines):
    tensors, flags = kda(T=5, grad=False)
    bad = "many", "-1", "1.5", "\N{SUPERSCRIPT TWO}", "9" * 5000  # more digits than int() takes
    for value in bad:
        monkeypatch.setenv("KERNEL_FUN_KDA_MIN_CTAS", value)
        for _ in range(2):
            assert is_supported(**tensors, **flags)[0]
    kind = "is ignored: accepted is a number of CTAs, 0 or more"
    assert [text for _, text in lines()] == [f"KERNEL_FUN_KDA_MIN_CTAS={v!r} {kind}" for v in bad]


def test_warmup_follows_the_floor(monkeypatch, problems):
    """What production would send to fla, warmup refuses to call warm."""
    monkeypatch.setenv("KERNEL_FUN_KDA_MIN_CTAS", "33")
    with pytest.raises(RuntimeError, match="warmup compiled nothing: a grid of 32 CTAs, below the 33"):
        warmup(B=1, T=2, H=16, K=16, V=128, device="cpu")
    assert problems[0].scan_ctas == 32


@pytest.mark.parametrize(("gpus", "device", "said"), [
    (0, "cuda", f"device='cuda', but torch {torch.__version__} finds no GPU here"),
    (2, "cuda:2", "device='cuda:2', but the GPUs here are 0 to 1"),
])
def test_warmup_without_its_gpu_says_so(monkeypatch, gpus, device, said):
    """Not torch's word for it, which is about a generator."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    for function in (warmup, cconv.warmup):
        with pytest.raises(RuntimeError) as raised:
            function(B=1, T=4, device=device, **({} if function is warmup else {"D": 6}))
        assert str(raised.value) == f"warmup compiled nothing: {said}"


@pytest.mark.parametrize(("function", "operator", "size"), [
    (warmup, "kernel_fun.kda.warm.chunk_kda", {"T": 4, "H": 1}),
    (cconv.warmup, "kernel_fun.cconv.ops.causal_conv1d", {"T": 4, "D": 6}),
])
def test_warmup_runs_the_backward_with_and_without_a_final_states_gradient(monkeypatch, function, operator, size):
    """Each is compiled apart. On tensors without values, which are on no CPU either."""
    met = []

    def operate(*, output_final_state=False, **call):
        y = call["x"] if "x" in call else call["v"]
        return y * 1, y.sum() if output_final_state else None

    def grad(outputs, leaves, incoming, **options):
        assert all(t.requires_grad for t in leaves)
        met.append(len(outputs))

    class Generator:
        def __init__(self, device):
            pass

        def manual_seed(self, seed):
            return None

    monkeypatch.setattr(torch, "Generator", Generator)
    monkeypatch.setattr(torch.autograd, "grad", grad)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(f"{operator.rpartition('.')[0]}.is_supported", lambda **call: (True, "k001_mine"))
    monkeypatch.setattr(operator, operate)
    assert function(B=2, **size, device="meta") > 0
    assert met == [1]
    assert function(B=2, **size, device="meta", output_final_state=True) > 0
    assert met == [1, 2, 1]
    function(B=2, **size, device="meta", output_final_state=True, backward=False)
    assert len(met) == 3


def test_no_floor_for_plain_torch(monkeypatch):
    """On CPU tensors, and for calls without tokens, there is no grid, and fla could not run them."""
    monkeypatch.setattr("kernel_fun.kda.ops.route", dispatch.route)
    monkeypatch.setenv("KERNEL_FUN_KDA_MIN_CTAS", "1000")
    tensors, flags = kda(T=5, grad=False)
    assert is_supported(**tensors, **flags)[0]
