"""On the GPU: fla's own tests of chunk_kda, their shapes, draws and tolerances, against fp64, with our kernels.

Widths of 60, 100 and 256 go to fla: its cases of those are here 64 or 128 wide. Those with disable_recompute, or of
chunk size 32, are here without: the results are the same. Of dA_log fla's tests only warn.
"""
import pytest
import torch
import torch.nn.functional as F
from gpu_calls import launched, need_kernels, of_module, plan_of, untuned
from small_inputs import recurrence, rms

from kernel_fun import kda as ours
from kernel_fun._common import promoted

pytestmark = pytest.mark.gpu

DENSE = {"o": 0.005, "ht": 0.005, "q": 0.008, "k": 0.008, "v": 0.008, "g": 0.02, "beta": 0.02, "dt_bias": 0.008,
         "initial_state": 0.008, "A_log": 0.02}
PACKED = {"o": 0.005, "ht": 0.005, "q": 0.007, "k": 0.008, "v": 0.007, "g": 0.015, "beta": 0.015, "dt_bias": 0.005,
          "initial_state": 0.007, "A_log": 0.02}
HALF, BF16 = torch.float16, torch.bfloat16
RAW, NORM, SAFE = {"use_gate_in_kernel": True}, {"use_qk_l2norm_in_kernel": True}, {"safe_gate": True}
# B, T, H, HV, K = V, scale, what divides the log gate, share of gates masked, dtype, flags
CASES = {
    "one_short_row": (1, 63, 1, 1, 64, 1.0, 1.0, 0.0, HALF, SAFE),
    "ragged_masked": (2, 1000, 3, 3, 64, 0.1, 1.0, 0.5, HALF, {}),
    "strong": (3, 1024, 4, 4, 128, 1.0, 0.1, 0.0, HALF, {}),  # fla's own is 100 wide
    "safe": (4, 1024, 4, 4, 128, 0.1, 1.0, 0.0, HALF, SAFE),
    "safe_norm": (4, 1024, 4, 4, 128, 0.1, 1.0, 0.0, HALF, SAFE | NORM),
    "raw_ragged": (2, 1500, 4, 4, 128, 0.1, 10.0, 0.0, HALF, RAW),
    "raw_safe_long": (4, 2048, 8, 8, 64, 0.1, 1.0, 0.0, HALF, RAW | SAFE),
    "grouped": (2, 1024, 2, 4, 64, 0.1, 1.0, 0.0, HALF, {}),
    "grouped_raw": (2, 1024, 2, 8, 64, 0.1, 1.0, 0.0, HALF, RAW),
    "grouped_raw_norm": (2, 1024, 4, 8, 128, 0.1, 1.0, 0.0, HALF, RAW | NORM),
    "grouped_short": (2, 160, 2, 4, 64, 0.1, 1.0, 0.0, HALF, RAW | SAFE),
    "bf16_grouped_safe": (2, 1024, 2, 4, 64, 0.1, 1.0, 0.0, BF16, RAW | SAFE | NORM),
    "bf16_grouped_raw": (2, 1024, 2, 4, 64, 0.1, 1.0, 0.0, BF16, RAW),
    "bf16_grouped_short": (2, 160, 2, 4, 64, 0.1, 1.0, 0.0, BF16, RAW | SAFE),
    "bf16_grouped_norm": (2, 1024, 2, 8, 128, 0.1, 1.0, 0.0, BF16, RAW | NORM),
}
# H, K = V, share of gates masked, ends of the sequences, dtype, flags; of those in bf16 fla has none
PACKS = {
    "one_of_15": (4, 64, 0.1, (0, 15), HALF, RAW),
    "nearly_all_masked": (4, 64, 0.9, (0, 256, 500, 1000), HALF, RAW),
    "half_masked": (4, 128, 0.5, (0, 256, 500, 1000), HALF, {}),
    "five": (4, 128, 0.0, (0, 15, 100, 300, 1200, 2000), HALF, RAW),
    "safe": (4, 128, 0.0, (0, 100, 300, 1200, 3000, 4096), HALF, SAFE),
    "short": (4, 64, 0.1, (0, 31, 96, 160), HALF, RAW),
    "empty_and_one_token": (4, 128, 0.1, (0, 0, 1, 65, 65, 193, 500), HALF, {}),
    "bf16_masked": (4, 128, 0.5, (0, 256, 500, 1000), BF16, {}),
    "bf16_raw": (4, 128, 0.0, (0, 15, 100, 300, 1200, 2000), BF16, RAW),
    "bf16_safe": (4, 128, 0.0, (0, 100, 300, 1200, 3000, 4096), BF16, SAFE),
    "bf16_narrow": (4, 64, 0.1, (0, 0, 1, 65, 65, 193, 500), BF16, RAW),
}


def dense_call(name, device="cuda"):
    """(tensors, flags, gradients that arrive) as fla's test draws them."""
    B, T, H, HV, D, scale, divisor, mask, dtype, flags = CASES[name]
    torch.manual_seed(42)
    q, k, v = (torch.rand(B, T, heads, D, dtype=dtype) for heads in (H, H, HV))
    raw = "use_gate_in_kernel" in flags
    tensors = {"q": q, "k": k, "v": v}
    if "use_qk_l2norm_in_kernel" not in flags:
        tensors |= {n: F.normalize(tensors[n].float(), dim=-1).to(dtype) for n in ("q", "k")}
    g = torch.randn(B, T, HV, D, dtype=dtype if raw else torch.float32)
    if raw:
        tensors |= {"A_log": torch.randn(HV), "dt_bias": torch.randn(HV * D)}
    else:
        g = F.logsigmoid(g) / divisor * (torch.rand(g.shape) > mask)
        g = g.clamp(-5, 0) if "safe_gate" in flags else g
    tensors |= {"g": g, "beta": torch.randn(B, T, HV, dtype=dtype).sigmoid(), "initial_state": torch.randn(B, HV, D, D)}
    flags = {**flags, "scale": scale, **({"lower_bound": -5.0} if raw and "safe_gate" in flags else {})}
    incoming = torch.randn_like(v), torch.randn(B, HV, D, D)
    return placed(tensors, device), flags, [t.to(device) for t in incoming]


def packed_call(name, device="cuda"):
    H, D, mask, ends, dtype, flags = PACKS[name]
    torch.manual_seed(42)
    N, T, raw = len(ends) - 1, ends[-1], "use_gate_in_kernel" in flags
    q, v = (torch.randn(1, T, H, D, dtype=dtype) for _ in range(2))
    k = F.normalize(torch.randn(1, T, H, D), dim=-1).to(dtype)
    g = torch.randn(1, T, H, D, dtype=dtype if raw else torch.float32)
    if not raw:
        g = F.logsigmoid(g)
    g = torch.where(torch.rand(g.shape) <= mask, -1000.0, g)
    g = g.clamp(-5, 0) if "safe_gate" in flags else g
    tensors = {"q": F.normalize(q.float(), dim=-1).to(dtype), "k": k, "v": v, "g": g}
    if raw:
        tensors |= {"A_log": torch.rand(1, 1, H, 1).mul(15).add(1).log(), "dt_bias": torch.randn(H * D)}
    tensors |= {"beta": torch.rand(1, T, H, dtype=dtype).sigmoid(), "initial_state": torch.randn(N, H, D, D)}
    incoming = torch.randn_like(v), torch.rand(N, H, D, D)
    flags = {**flags, "cu_seqlens": torch.tensor(ends, device=device)}
    return placed(tensors, device), flags, [t.to(device) for t in incoming]


def call(name, device="cuda"):
    packed = name.startswith("packed_")
    return packed_call(name.removeprefix("packed_"), device) if packed else dense_call(name, device)


def budgets(name):
    """fla's for dense calls also where packed ones are in bf16."""
    return PACKED if name.startswith("packed_") and "bf16" not in name else DENSE


def placed(tensors, device):
    return {name: t.to(device).requires_grad_() for name, t in tensors.items()}


def results(operator, tensors, flags, incoming):
    """Both results and every gradient, by name."""
    o, ht = operator(**tensors, **flags, output_final_state=True)
    arriving = [d.to(y.dtype) for d, y in zip(incoming, (o, ht), strict=True)]
    grads = torch.autograd.grad((o, ht), tuple(tensors.values()), arriving)
    return {"o": o.detach(), "ht": ht.detach(), **dict(zip(tensors, grads, strict=True))}


def too_far(got, tensors, flags, incoming, budgets):
    """Which of the results are further from fp64 than fla's tests allow."""
    want = results(recurrence, tensors, flags, incoming)
    assert all(got[name].dtype == t.dtype for name, t in tensors.items())
    errors = {name: rms(t, want[name]) for name, t in got.items()}
    return {name: error for name, error in errors.items() if not error < budgets[name]}


def engaged(tensors, flags, incoming):
    """In both passes there are kernels of ours, and every one of the plan's is launched."""
    plan = plan_of(tensors, {**flags, "output_final_state": True})
    modules = {name: module for name, module, _ in promoted.modules("kernel_fun.kda")}
    for steps in (plan.forward, plan.backward):
        assert any(step.source in modules for step in steps)
    found = launched(lambda: results(ours.chunk_kda, tensors, flags, incoming))
    assert all(of_module(found, modules[source]) for source in plan.sources() if source in modules)


@pytest.mark.parametrize("name", [*CASES, *(f"packed_{name}" for name in PACKS)])
def test_flas_cases(name, monkeypatch):
    need_kernels("kda")
    untuned(monkeypatch)
    tensors, flags, incoming = call(name)
    ok, what = ours.is_supported(**tensors, **flags, output_final_state=True)
    assert ok, what
    got = results(ours.chunk_kda, tensors, flags, incoming)
    assert too_far(got, tensors, flags, incoming, budgets(name)) == {}
    engaged(tensors, flags, incoming)


@pytest.mark.parametrize("dtype", [BF16, HALF])
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("more", [{}, RAW | SAFE | NORM | {"lower_bound": -5.0, "use_beta_sigmoid_in_kernel": True}])
def test_states_in_both_layouts(D, dtype, more, monkeypatch):
    """The same call with each state turned: its results and gradients are the same, turned."""
    need_kernels("kda")
    untuned(monkeypatch)
    torch.manual_seed(42)
    B, T, H, HV, V = 2, 333, 2, 4, 2 * D
    q, k = (F.normalize(torch.randn(B, T, H, D), dim=-1).to(dtype) for _ in range(2))
    tensors = {"q": q, "k": k, "v": torch.randn(B, T, HV, V, dtype=dtype), "g": torch.randn(B, T, HV, D)}
    tensors |= {"beta": torch.rand(B, T, HV)}
    if more:
        tensors |= {"A_log": torch.rand(HV), "dt_bias": torch.randn(HV * D)}
    else:
        tensors["g"] = F.logsigmoid(tensors["g"])
    state, do, dht = torch.randn(B, HV, D, V), torch.randn(B, T, HV, V, dtype=dtype), torch.randn(B, HV, D, V)
    found = []
    for turned in (False, True):
        h0, d = (x.mT.contiguous() if turned else x for x in (state, dht))
        given, incoming = placed(tensors | {"initial_state": h0}, "cuda"), [do.cuda(), d.cuda()]
        flags = {**more, "state_v_first": turned}
        assert ours.is_supported(**given, **flags, output_final_state=True)[0]
        got = results(ours.chunk_kda, given, flags, incoming)
        assert too_far(got, given, flags, incoming, DENSE) == {}
        found.append(got)
    plain, turned = found
    for name in ("ht", "initial_state"):
        assert turned[name].shape == (B, HV, V, D)
        turned[name] = turned[name].mT
    assert all(torch.equal(plain[name], turned[name]) for name in plain)
