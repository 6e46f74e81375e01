"""A launch that skips Triton's binding must still compile anew for whatever Triton would compile anew for."""

import pytest
import torch

from kernel_fun._common import launch as module
from kernel_fun._common.launch import launch


class Kernel:
    """Stands in for a JITFunction: notes what is compiled and what is launched."""

    arg_names = ("x", "y", "n", "scale", "K", "FULL")

    def __init__(self):
        self.compiled, self.launched = [], []

    def __getitem__(self, grid):
        def run(*args, **constants):
            self.compiled.append(constants)
            self.launched.append((grid, args))
            return Compiled(self)

        return run


class Compiled:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *args: self.kernel.launched.append((grid, args))


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(module, "JITFunction", Kernel)
    monkeypatch.setattr(module, "_compiled", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return Kernel()


def call(kernel, x, n=64, scale=0.5, y=None, **constants):
    launch(kernel, (4, 2), x, y, n, scale, **{"K": 128, "FULL": True, "num_warps": 4} | constants)


def test_a_second_call_launches_what_the_first_compiled(kernel):
    a, b = torch.zeros(64), torch.ones(64)
    call(kernel, a)
    call(kernel, b, scale=0.25)
    assert len(kernel.compiled) == 1
    grid, args = kernel.launched[1]
    assert grid == (4, 2, 1)
    assert args[0] is b
    assert args[1:] == (None, 64, 0.25, 128, True)


buffer = torch.zeros(80)
OTHERS = {
    "dtype": {"x": torch.zeros(64, dtype=torch.bfloat16)},
    "alignment": {"x": buffer[1:65]},
    "none": {"y": torch.zeros(4)},
    "one": {"n": 1},
    "divisible": {"n": 63},
    "wide": {"n": 2**40},
    "constant": {"FULL": False},
    "option": {"num_warps": 8},
    "float": {"scale": 1},
}


@pytest.mark.parametrize("what", OTHERS)
def test_what_triton_compiles_for_is_told_apart(kernel, what):
    call(kernel, torch.zeros(64))
    call(kernel, **{"x": torch.zeros(64)} | OTHERS[what])
    assert len(kernel.compiled) == 2


def test_another_device_or_kernel_is_another_kind(kernel, monkeypatch):
    x, other = torch.zeros(64), Kernel()
    call(kernel, x)
    call(other, x)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    call(kernel, x)
    assert (len(kernel.compiled), len(other.compiled)) == (2, 1)


def test_an_interpreted_kernel_is_called_as_it_is(monkeypatch):
    monkeypatch.setattr(module, "_compiled", {})
    kernel = Kernel()
    call(kernel, torch.zeros(64))
    call(kernel, torch.zeros(64))
    assert len(kernel.compiled) == 2
    assert not module._compiled
