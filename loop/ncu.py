"""Hardware counters of an idea's kernels through Nsight Compute, on machines that have it and allow it.

`read` starts `ncu` on this module, which runs the arm once inside a profiled range; the answer is one line for each
kernel, or the reason why there is none. Counters slow kernels down: they say what bounds a kernel, never how long it
takes.
"""

import csv
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

from loop import execute, registry

METRICS = {
    "gpu__time_duration.sum": "time",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "memory",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "compute",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "achieved occupancy",
}
TIMEOUT = 600  # seconds: each kernel runs several times


def read(idea: str, case: str, mode: str) -> list[dict] | str:
    """One dict for each kernel launch with what METRICS names, or one line that says why there are none."""
    program = shutil.which("ncu")
    if program is None:
        return "None: ncu is not installed here."
    options = ["--csv", "--page", "raw", "--metrics", ",".join(METRICS), "--profile-from-start", "off"]
    command = [program, *options, sys.executable, "-m", "loop.ncu", idea, case, mode]
    environment = {**os.environ, "PYTHONPATH": execute.python_path()}
    try:
        done = subprocess.run(
            command, cwd=registry.root(), env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        return f"None: ncu took more than {TIMEOUT} s."
    lines = done.stdout.splitlines()
    found = parse(lines)
    if found:
        return found
    said = [line for line in (*lines, *done.stderr.splitlines()) if "==ERROR==" in line]
    return f"None: {execute.one_line(said[0] if said else f'ncu ended with code {done.returncode}')}"


def parse(lines: Sequence[str]) -> list[dict]:
    """ncu's raw CSV page: a header, a line of units, then one line for each launch."""
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return []
    units, *launches = list(csv.DictReader(lines[start:])) or [{}]
    return [
        {"kernel": launch["Kernel Name"][:60].replace("|", "\\|")}
        | {name: f"{launch.get(key, '')} {units.get(key, '')}".strip() for key, name in METRICS.items()}
        for launch in launches
    ]


def _once(idea: str, case: str, mode: str) -> None:
    """Run the idea's arm warm, then once inside the range that ncu looks at."""
    import torch

    from loop import arms, calls, cases, inputs

    family = registry.find(idea).family
    call = calls.make(arms.make(family, idea), inputs.make(cases.get(family, case), 0, "cuda"), mode)
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    _once(*sys.argv[1:])
