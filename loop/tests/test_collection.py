"""The tests of kernels are there also on a machine that has no notebook tools: one that only measures."""

import os
import subprocess
import sys

from loop import execute, registry

ABSENT = ("hypothesis", "jinja2", "jupytext", "matplotlib", "mistune", "nbclient", "nbconvert", "nbformat", "papermill")
HIDES = f"""
from importlib.machinery import PathFinder

found = PathFinder.find_spec
PathFinder.find_spec = lambda name, *where: None if name.partition(".")[0] in {ABSENT} else found(name, *where)
"""


def test_gpu_tests_are_collected_without_the_notebook_tools(tmp_path):
    (tmp_path / "hides.py").write_text(HIDES)
    path = os.pathsep.join([str(tmp_path), execute.python_path()])
    flags = ["-p", "hides", "-p", "no:hypothesispytest", "-p", "no:cacheprovider", "-q", "--collect-only", "-m", "gpu"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *flags, "loop/tests"],
        cwd=registry.root(), env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:]
    assert "test_bench.py::test_on_a_gpu_arms_are_replayed_and_clocks_read" in done.stdout
