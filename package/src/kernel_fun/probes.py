"""What `python -m kernel_fun prodtime` and `graphprobe` measure: the installed copy next to fla, on this machine.

Three arms: `fla`, `ours`, and `off`, which is ours under KERNEL_FUN_DISABLE=1: the wrapper without the kernels, the
control that an A/B needs. Both need a GPU, because fla does.
"""
import contextlib
import functools
import importlib
import json
import os
import statistics
import subprocess
import sys

import torch

from . import versions
from ._common import support

ARMS = ("fla", "ours", "off")
OPERATORS = {"kda": "chunk_kda", "cconv": "causal_conv1d"}
FLA = {"kda": "fla.ops.kda", "cconv": "fla.modules.convolution"}

# family -> case -> sizes; the KDA cases are those of a 16-head V=256 model and of a 32-head V=128 one
PRODUCTION = {
    "kda": {
        "prod8192_gate": {"B": 16, "T": 8192, "H": 16, "K": 128, "V": 256, "gate": "softplus"},
        "prod8192": {"B": 16, "T": 8192, "H": 16, "K": 128, "V": 256, "gate": "log"},
        "kimi8192_safe": {"B": 4, "T": 8192, "H": 32, "K": 128, "V": 128, "gate": "safe"},
    },
    "cconv": {
        "prod8192_qk": {"B": 16, "T": 8192, "D": 2048, "W": 4},
        "prod8192_v": {"B": 16, "T": 8192, "D": 4096, "W": 4},
    },
}
SMALL = {
    "kda": {"B": 1, "T": 256, "H": 2, "K": 64, "V": 64, "gate": "softplus"},
    "cconv": {"B": 2, "T": 256, "D": 64, "W": 4},
}


def inputs(family: str, device: str = "cuda", **sizes) -> tuple[dict, dict]:
    """(tensors with requires_grad, flags) of one call of the family's operator."""
    random = torch.Generator(device).manual_seed(0)

    def draw(*shape, dtype=torch.bfloat16):
        return torch.randn(shape, generator=random, device=device, dtype=dtype).requires_grad_()

    if family == "cconv":
        B, T, D, W = (sizes[name] for name in "BTDW")
        return {"x": draw(B, T, D), "weight": draw(D, W, dtype=torch.float32)}, {"activation": "silu"}
    B, T, H, K, V = (sizes[name] for name in "BTHKV")
    tensors = {"q": draw(B, T, H, K), "k": draw(B, T, H, K), "v": draw(B, T, H, V)}
    flags = {"use_qk_l2norm_in_kernel": True}
    if sizes["gate"] == "log":
        raw = draw(B, T, H, K, dtype=torch.float32).detach()
        tensors["g"] = torch.nn.functional.logsigmoid(raw).requires_grad_()
        tensors["beta"] = (2 * draw(B, T, H, dtype=torch.float32).detach().sigmoid()).requires_grad_()
        return tensors, flags
    rate = torch.rand(H, generator=random, device=device)
    flags["use_gate_in_kernel"] = True
    tensors["g"] = draw(B, T, H, K)
    tensors["beta"] = draw(B, T, H, dtype=torch.float32)
    tensors["A_log"] = (1 + 15 * rate).log().requires_grad_()
    tensors["dt_bias"] = draw(H * K, dtype=torch.float32)
    flags["use_beta_sigmoid_in_kernel"] = True
    if sizes["gate"] == "safe":
        flags.update(safe_gate=True, lower_bound=-5.0)
    else:
        flags["allow_neg_eigval"] = True
    return tensors, flags


@contextlib.contextmanager
def running(arm: str):
    """The process as the arm wants it: ours switched off for `off`, fla kept from dispatching to us for `fla`."""
    before = os.environ.get("KERNEL_FUN_DISABLE")
    if arm == "off":
        os.environ["KERNEL_FUN_DISABLE"] = "1"
    try:
        with support.fla_only() if arm == "fla" else contextlib.nullcontext():
            yield
    finally:
        if arm == "off":
            os.environ.pop("KERNEL_FUN_DISABLE")
            if before is not None:
                os.environ["KERNEL_FUN_DISABLE"] = before


def operator(family: str, arm: str):
    """The function that the arm calls."""
    return getattr(importlib.import_module(FLA[family] if arm == "fla" else f"kernel_fun.{family}"), OPERATORS[family])


def _need_gpu() -> None:
    if torch.cuda.is_available():
        return
    why = "needs an NVIDIA GPU: fla, which it measures against, runs on nothing else"
    try:
        torch.cuda.init()  # says more than is_available: a driver that is too old, a GPU that is busy or lost
    except (RuntimeError, AssertionError) as error:
        why += f" ({str(error).strip().partition(chr(10))[0]})"
    raise RuntimeError(why)


# ------------------------------------------------------------------------------------------------------------ prodtime
def prodtime(family: str | None = None, batch: int | None = None, repeats: int = 10) -> None:
    """Print the median ms of every arm at the production shapes: fwd, bwd, fwdbwd (gradients do not accumulate)."""
    _need_gpu()
    if repeats < 1 or (batch is not None and batch < 1):
        raise ValueError(f"repeats={repeats}, batch={batch}: both must be at least 1")
    print(torch.cuda.get_device_name(), *(f"{name} {version}" for name, version in versions().items()), sep=", ")
    print(f"ms, median of {repeats}; off is ours with KERNEL_FUN_DISABLE=1")
    print(f"{'family':8}{'case':16}{'mode':8}{'fla':>9}{'ours':>9}{'off':>9}{'fla/ours':>10}  kernels")
    for name in [family] if family else PRODUCTION:
        for case, sizes in PRODUCTION[name].items():
            tensors, flags = inputs(name, **{**sizes, "B": batch or sizes["B"]})
            _, what = importlib.import_module(f"kernel_fun.{name}").is_supported(**tensors, **flags)
            for mode in ("fwd", "bwd", "fwdbwd"):
                try:
                    ms = _times({arm: _work(name, arm, mode, tensors, flags) for arm in ARMS}, repeats)
                except torch.OutOfMemoryError:
                    has = torch.cuda.get_device_properties().total_memory >> 30
                    raise RuntimeError(f"{case} {mode} needs more than this GPU's {has} GiB: try --batch 1") from None
                cells = "".join(f"{ms[arm]:9.3f}" for arm in ARMS)
                print(f"{name:8}{case:16}{mode:8}{cells}{ms['fla'] / ms['ours']:10.3f}  {what}", flush=True)
            del tensors, flags


def _work(family: str, arm: str, mode: str, tensors: dict, flags: dict):
    """One call of an arm in a mode, without arguments."""
    call, leaves = operator(family, arm), list(tensors.values())

    def forward():
        return call(**tensors, **flags)[0]

    def grads(out):
        torch.autograd.grad(out, leaves, torch.ones_like(out), retain_graph=True)

    if mode == "fwd":
        work = torch.no_grad()(forward)
    elif mode == "bwd":
        with running(arm):
            kept = forward()
        work = functools.partial(grads, kept)
    else:
        def work():
            grads(forward())
    return work


def _times(works: dict, repeats: int) -> dict[str, float]:
    """Median ms per arm; the arms take turns, in an order that rotates, after three rounds that do not count."""
    arms, times = list(works), {arm: [] for arm in works}
    for n in range(3 + repeats):
        for arm in arms[n % len(arms) :] + arms[: n % len(arms)]:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with running(arm):
                start.record()
                works[arm]()
                end.record()
            torch.cuda.synchronize()
            if n >= 3:
                times[arm].append(start.elapsed_time(end))
    return {arm: statistics.median(ms) for arm, ms in times.items()}


# ---------------------------------------------------------------------------------------------------------- graphprobe
def graphprobe(family: str | None = None) -> None:
    """Print, per operator and arm, graph breaks and recompiles of a compiled block, and what CUDA graph capture did.

    Each arm runs in its own process, because a capture that fails may take its process with it. RuntimeError, after the
    table, names the arms whose process failed.
    """
    _need_gpu()
    failed = []
    print(f"{'family':8}{'arm':6}{'breaks':>7}{'graphs at T=256, 320, 384':>28}   capture: warm, cold")
    for name in [family] if family else OPERATORS:
        for arm in ARMS:
            code = f"from kernel_fun import probes; probes.report({name!r}, {arm!r})"
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
            lines = done.stdout.strip().splitlines()
            if done.returncode or not lines:
                print(f"{name:8}{arm:6} failed: {(done.stderr.strip().splitlines() or ['no output'])[-1]}", flush=True)
                failed.append(f"{name} {arm}")
                continue
            found = json.loads(lines[-1])
            graphs = ", ".join(map(str, found["graphs"]))
            print(f"{name:8}{arm:6}{found['breaks']:7}{graphs:>28}   {found['warm']}, {found['cold']}", flush=True)
    if failed:
        raise RuntimeError(f"failed: {', '.join(failed)}")


def report(family: str, arm: str) -> None:
    """Probe one arm and print the findings as one line of JSON."""
    with running(arm):
        found = compiled(family, arm, "cuda")
        found.update(warm=captured(family, arm, warm=True), cold=captured(family, arm, warm=False))
    print(json.dumps(found))


def compiled(family: str, arm: str, device: str) -> dict:
    """{"breaks", "graphs"}: graph breaks in a compiled block with the operator between two additions, and the number of
    graphs compiled so far after each of three lengths.
    """
    call, counted, totals = operator(family, arm), [], []

    def count(graph, example_inputs):
        counted.append(graph)
        return graph.forward

    def block(tensors, flags):
        first, *rest = tensors
        return call(**{first: tensors[first] + 0.0, **{name: tensors[name] for name in rest}}, **flags)[0] + 1.0

    block = torch.compile(block, backend=count)
    for T in (256, 320, 384):
        block(*inputs(family, device, **{**SMALL[family], "T": T}))
        totals.append(len(counted))
    return {"breaks": totals[0] - 1, "graphs": totals}


def captured(family: str, arm: str, warm: bool) -> str:
    """What capturing a forward and backward does: "equal", "differs", or the error. A cold shape has never run."""
    sizes = {**SMALL[family], "T": 512 if warm else 576}
    tensors, flags = inputs(family, **sizes)
    call, leaves = operator(family, arm), list(tensors.values())

    def step():
        out = call(**tensors, **flags)[0]
        return [out, *torch.autograd.grad(out, leaves, torch.ones_like(out))]

    side, want = torch.cuda.Stream(), None
    side.wait_stream(torch.cuda.current_stream())  # which made the inputs
    if warm:
        with torch.cuda.stream(side):
            want = [t.clone() for t in step()]
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=side):
            got = step()
        graph.replay()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:80]}"
    if want is None:
        want = step()
    return "equal" if all(torch.equal(a, b) for a, b in zip(got, want, strict=True)) else "differs"
