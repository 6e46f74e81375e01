"""On the GPU: after `warmup`, a process compiles nothing more for calls of that configuration."""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_calls import need_kernels
from warm_process import CONFIGURATIONS

import kernel_fun
from kernel_fun._common import promoted

HERE = Path(__file__).parent


@pytest.mark.gpu
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_nothing_is_left_to_compile(name):
    need_kernels("kda")
    path = os.pathsep.join([str(HERE), str(Path(kernel_fun.__file__).parents[1])])
    command = [sys.executable, "-W", "ignore", str(HERE / "warm_process.py"), name]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["warmup"]["triton"]
    if name != "narrow" and not promoted.missing("kernel_fun.kda"):
        assert found["warmup"]["cute"]
    assert found["after"] == {"triton": 0, "cute": 0}
