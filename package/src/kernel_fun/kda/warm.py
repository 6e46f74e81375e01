"""`warmup`: compile what one configuration of `chunk_kda` launches, before the first training step."""
import itertools
import time

import torch
import torch.nn.functional as F

from .._common import support, warming
from .ops import chunk_kda, is_supported


def warmup(
    *,
    B: int = 1,
    T: int = 256,
    H: int = 16,
    K: int = 128,
    V: int = 128,
    HV: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    g_dtype: torch.dtype | None = None,
    beta_dtype: torch.dtype = torch.float32,
    lengths: tuple[int, ...] | None = None,
    initial_state: bool = False,
    backward: bool = True,
    device: str | torch.device = "cuda",
    **flags,
) -> float:
    """Compile, before the first training step, every kernel that one configuration of `chunk_kda` launches; returns
    the seconds it took.

    Runs a forward without gradients and (with `backward`) a forward and a backward on made-up inputs of the given
    shape: give the run's own B and T, on which it depends which kernels run, and `lengths` (of the packed sequences,
    B = 1) for a packed call. g_dtype None means fp32, or `dtype` with use_gate_in_kernel. `flags` are chunk_kda's own
    (use_gate_in_kernel=True, lower_bound=-5.0, ...); A_log and dt_bias are made up. Leaves torch's random state alone.

    Raises RuntimeError with the reason when there is no such device or such a call would go to fla,
    KERNEL_FUN_KDA_MIN_CTAS included: nothing would have been compiled, and step 1 would pay for it.
    """
    start = time.perf_counter()
    reason = support.absent(device)
    if reason:
        raise RuntimeError(f"warmup compiled nothing: {reason}")
    HV = H if HV is None else HV
    random = torch.Generator(device=device).manual_seed(0)
    in_kernel = flags.get("use_gate_in_kernel", False)
    total = T if lengths is None else sum(lengths)

    def draw(*shape, dtype=dtype):
        return torch.randn(shape, generator=random, device=device, dtype=torch.float32).to(dtype)

    g = draw(B, total, HV, K)
    call = {
        "q": draw(B, total, H, K),
        "k": draw(B, total, H, K),
        "v": draw(B, total, HV, V),
        "g": g.to(g_dtype or dtype) if in_kernel else F.logsigmoid(g.float()).to(g_dtype or torch.float32),
        "beta": draw(B, total, HV).float().sigmoid().to(beta_dtype),
    }
    if in_kernel:
        call["A_log"], call["dt_bias"] = draw(HV, dtype=torch.float32), draw(HV * K, dtype=torch.float32)
    if lengths is not None:
        call["cu_seqlens"] = torch.tensor([0, *itertools.accumulate(lengths)], device=device)
    if initial_state:
        state = (V, K) if flags.get("state_v_first") else (K, V)
        call["initial_state"] = draw(B if lengths is None else len(lengths), HV, *state, dtype=torch.float32)
    for x in call.values():
        if backward and x.is_floating_point():
            x.requires_grad_(True)
    ok, what = is_supported(**call, **flags)
    if not ok or call["q"].is_cpu:
        raise RuntimeError(f"warmup compiled nothing: {what}")
    with torch.no_grad():  # keeps nothing for a backward, which is compiled apart from a forward that does
        if is_supported(**call, **flags)[0]:  # kernels may serve the backward alone
            chunk_kda(**call, **flags)
    if backward:
        o, ht = chunk_kda(**call, **flags)
        leaves = [x for x in call.values() if x.requires_grad]
        warming.run_backwards(o, ht, leaves)
    torch.cuda.synchronize(call["q"].device)
    return time.perf_counter() - start
