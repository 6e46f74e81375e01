"""`./ladder test`: ruff, then every test of the harness and the package that this machine can run."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
MOST_WORKERS = 8


def selftest(pytest_args: Sequence[str] = ()) -> int:
    """Run both; returns 0 only if both are clean. `pytest_args` go to pytest as they are.

    Without a GPU the tests are spread over the cores. With one they run in turn: they would compete for it.
    """
    import torch

    began = time.monotonic()
    lint = subprocess.call([sys.executable, "-m", "ruff", "check", "."], cwd=CHECKOUT)
    cores = len(os.sched_getaffinity(0))
    spread = (
        [] if torch.cuda.is_available() or cores == 1 else ["-n", str(min(cores, MOST_WORKERS)), "--dist", "worksteal"]
    )
    # each worker is one busy core; more threads in it would only take turns
    environment = os.environ | ({"OMP_NUM_THREADS": "1"} if spread else {})
    tests = subprocess.call(
        [sys.executable, "-m", "pytest", "-q", *spread, *pytest_args], cwd=CHECKOUT, env=environment
    )
    seconds = time.monotonic() - began
    said = {0: "passed"}.get(tests, f"failed (pytest exit code {tests})")
    print(f"ladder test: ruff {'clean' if lint == 0 else 'found problems'}, tests {said}, {seconds:.0f} s", flush=True)
    return int(bool(lint or tests))
