"""What the first call costs: an arm's compilation and tuning, in a fresh process with empty kernel caches.

The child times the first forward and backward of one arm on one case, then the same again warm, then checks the arm: a
time of a wrong build is not recorded. A second child finds the caches that the first has filled, and is only timed.
Caches of Triton, the CuTe DSL and the driver start empty; fla's tuned configurations (FLA_CONFIG_DIR) are what the
environment says, and rows record them.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

from loop import arms, cases, results, rows
from loop.registry import root

TIMEOUT_S = 1200  # fla alone tunes for 220 s where it finds no configurations
CACHES = ("TRITON_CACHE_DIR", "CUDA_CACHE_PATH", "CUTE_DSL_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")


def firstcall(
    family: str,
    name: str,
    case_id: str,
    timeout: float = TIMEOUT_S,
    writer: rows.Writer | None = None,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> rows.Row:
    """Measure in a child process; the row, written when there is a writer.

    ValueError for an unknown arm or case, or a GPU case without a GPU. What goes wrong in the child is the row's
    status.
    """
    case, arm = cases.get(family, case_id), arms.make(family, name)
    cases.require_device(case, "cuda" if arms.on_gpu() else "cpu")
    progress(f"first call of {name} on {case_id}, in a process of its own", 0, 1)
    found = _in_child(family, name, case_id, timeout)
    fields = {
        "kind": "firstcall",
        "cmd": f"./ladder firstcall {family} --impl {name} --case {case_id}",
        "run_id": writer.run_id if writer else rows.new_run_id(),
        "status": found["status"],
        "reason": found["reason"],
    }
    if found.get("check"):
        fields["check"] = rows.Check.model_validate(found["check"])
    if found["status"] == "PASSED":
        fields["firstcall"] = rows.FirstCall.model_validate(found["times"])
    row = results.row(arm, case, **fields)
    return writer.write(row) if writer else rows.seal(row)


def _in_child(family: str, name: str, case_id: str, timeout: float) -> dict:
    with tempfile.TemporaryDirectory(prefix="firstcall-") as empty:
        environment = {**os.environ, **{cache: os.path.join(empty, cache.lower()) for cache in CACHES}}
        found = _said([family, name, case_id, "checked"], environment, timeout)
        if found["status"] == "PASSED":
            again = _said([family, name, case_id, "timed"], environment, timeout)
            if again["status"] != "PASSED":
                return again
            found["times"] |= {f"cached_{pass_}_s": again["times"][f"{pass_}_s"] for pass_ in ("fwd", "fwdbwd")}
    return found


def _said(arguments: list[str], environment: dict, timeout: float) -> dict:
    command = [sys.executable, "-m", "loop.firstcall", *arguments]
    try:
        done = subprocess.run(
            command, cwd=root(), env=environment, capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        return {"status": "TIMEOUT", "reason": f"no first call within {timeout:g} s"}
    last = done.stdout.strip().splitlines()[-1:] or [""]
    try:
        return json.loads(last[0])
    except json.JSONDecodeError:
        said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        return {"status": "KERNEL_DIED", "reason": f"its process ended with code {done.returncode}: {said[:300]}"}


def child(family: str, name: str, case_id: str, what: str) -> dict:
    """In the fresh process: first call, second call, and if `what` is "checked" a check. Plain types, for one line of
    JSON."""
    import torch

    from loop import calls, check, inputs

    device = "cuda" if arms.on_gpu() else "cpu"
    case = cases.get(family, case_id)
    given, leaves = calls.leaf_inputs(inputs.make(case, 0, device))  # makes the device's context
    began = time.perf_counter()
    for module in ("fla.ops.kda", "fla.modules.convolution") if device == "cuda" else ():
        importlib.import_module(module)
    arm = arms.make(family, name)
    ok, reason = arm.supports(case)
    import_s = time.perf_counter() - began
    if not ok:
        return {"status": "UNSUPPORTED", "reason": reason}

    def wait():
        if device == "cuda":
            torch.cuda.synchronize()

    def both() -> tuple[float, float]:
        wait()
        start = time.perf_counter()
        out = arm.op(given, True)
        wait()
        middle = time.perf_counter()
        calls.gradients(out, given, leaves)
        wait()
        return middle - start, time.perf_counter() - start

    fwd_s, fwdbwd_s = both()
    _, second = both()
    times = {"fwd_s": fwd_s, "fwdbwd_s": fwdbwd_s, "import_s": import_s, "second_fwdbwd_s": second}
    if what == "timed":
        return {"status": "PASSED", "reason": "", "times": times}
    found = check.check(arm, case)
    said = {
        "status": str(found.status),
        "reason": found.message,
        "check": results.check_part(found).model_dump(mode="json"),
    }
    return said | {"times": times}


if __name__ == "__main__":
    print(json.dumps(child(*sys.argv[1:5])), flush=True)
