"""Shared by the package's tests: the GPU gate, clean switches and log state, small inputs."""
import logging
import os
import sys
from pathlib import Path

import pytest
import torch

from kernel_fun._common import dispatch, support

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # small_inputs.py, also where pytest imports tests by path alone


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU of compute capability 9.0 or above")
    config.addinivalue_line("markers", "slow: builds or installs something, or takes more than a few seconds")


def pytest_collection_modifyitems(items):
    reason = None
    if not torch.cuda.is_available():
        reason = "no GPU"
    elif torch.cuda.get_device_capability() < (9, 0):
        reason = f"GPU of capability {torch.cuda.get_device_capability()}, kernels need 9.0"
    for item in items:
        if reason and "gpu" in item.keywords and HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def clean_state(monkeypatch):
    """No switch set, nothing logged yet, no route remembered."""
    for name in list(os.environ):
        if name.startswith("KERNEL_FUN_"):
            monkeypatch.delenv(name)
    support._said.clear()
    dispatch._routes.clear()


@pytest.fixture
def lines(caplog):
    """The package's log lines so far, as (level name, text)."""
    caplog.set_level(logging.INFO, logger="kernel_fun")
    return lambda: [(r.levelname, r.getMessage()) for r in caplog.records if r.name == "kernel_fun"]
