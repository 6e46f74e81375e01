"""`./ladder open NNN`: JupyterLab on an idea's notebook, with this checkout's modules importable in its kernels."""

import os
import subprocess
import sys

from loop import execute, registry, run


def open_lab(idea: str) -> int:
    """Serve JupyterLab until it is stopped; returns its exit code. ValueError for an unknown idea, or one without a
    notebook."""
    notebook = run.notebook_of(registry.folder(idea))
    command = [sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={registry.root()}", str(notebook)]
    if os.geteuid() == 0:  # as in a training image's container, where JupyterLab would refuse to start
        command.append("--allow-root")
    return subprocess.call(command, cwd=registry.root(), env={**os.environ, "PYTHONPATH": execute.python_path()})
