"""A launch that skips Triton's binding must still compile anew for whatever Triton would compile anew for."""

import inspect
import itertools
from types import SimpleNamespace

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import jit

from kernel_fun._common import launch as module
from kernel_fun._common import tiles as shared
from kernel_fun._common.launch import launch


class Kernel:
    """Stands in for a JITFunction: notes what is compiled and what is launched."""

    arg_names = ("x", "y", "n", "scale", "K", "FULL")

    def __init__(self):
        self.compiled, self.launched, self.hooked, self.told = [], [], False, 0

    def __getitem__(self, grid):
        def run(*args, **constants):
            self.compiled.append(constants)
            self.launched.append((grid, args))
            return None if self.hooked else Compiled(self)

        return run


class Compiled:
    """Stands in for a CompiledKernel, which is launched by `run` or, where somebody wants to be told, by its grid."""

    function, packed_metadata = "function", "packed"

    def __init__(self, kernel):
        self.kernel = kernel

    def run(self, x, y, z, *args):
        assert args[:6] == ("stream 0", self.function, self.packed_metadata, None, None, None)
        self.kernel.launched.append(((x, y, z), args[6:]))

    def __getitem__(self, grid):
        def run(*args):
            self.kernel.told += 1
            self.kernel.launched.append((grid, args))

        return run


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(module, "JITFunction", Kernel)
    monkeypatch.setattr(module, "CompiledKernel", Compiled)
    monkeypatch.setattr(module, "_compiled", {})
    monkeypatch.setattr(module, "_device", lambda: 0)
    monkeypatch.setattr(module, "_stream", lambda device: f"stream {device}")
    monkeypatch.setattr(module, "_knobs", SimpleNamespace(runtime=Hooks()))
    return Kernel()


class Hooks:
    def __init__(self):
        self.launch_enter_hook, self.launch_exit_hook = SimpleNamespace(calls=[]), SimpleNamespace(calls=[])


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


def test_whoever_wants_to_be_told_of_launches_is(kernel, monkeypatch):
    """Triton's hooks are chains, mostly empty; in some versions they are None or a function."""
    call(kernel, torch.zeros(64))
    runtime = module._knobs.runtime
    for told, enter, leave in (
        (0, SimpleNamespace(calls=[]), SimpleNamespace(calls=[])), (0, None, None), (1, print, None), (1, None, print),
        (1, SimpleNamespace(calls=[print]), SimpleNamespace(calls=[])),
        (1, SimpleNamespace(calls=[]), SimpleNamespace(calls=[print])),
    ):  # fmt: skip
        kernel.told, runtime.launch_enter_hook, runtime.launch_exit_hook = 0, enter, leave
        call(kernel, torch.zeros(64))
        assert kernel.told == told
        assert kernel.launched[-1][0] == (4, 2, 1)
    assert len(kernel.compiled) == 1


def test_a_triton_whose_own_last_step_is_not_known_is_launched_in_the_ordinary_way(kernel, monkeypatch):
    monkeypatch.setattr(module, "_knobs", None)
    for _ in range(2):
        call(kernel, torch.zeros(64))
    assert kernel.told == 1
    assert len(kernel.compiled) == 1


def test_a_known_triton_ends_its_own_launch_as_it_is_ended_here():
    """What `launch` passes but for hooks is what JITFunction.run passes, argument by argument."""
    if module._knobs is None and not triton.__version__.startswith(("3.6.", "3.7.")):
        pytest.skip("this Triton is launched in the ordinary way")
    source = " ".join(inspect.getsource(jit.JITFunction.run).split())
    assert (
        "kernel.run(grid_0, grid_1, grid_2, stream, kernel.function, kernel.packed_metadata, launch_metadata, "
        "knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook, *bound_args.values())"
    ) in source


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
    monkeypatch.setattr(module, "_device", lambda: 1)
    call(kernel, x)
    assert (len(kernel.compiled), len(other.compiled)) == (2, 1)


def test_what_a_hook_took_over_is_launched_in_the_ordinary_way(kernel):
    kernel.hooked = True
    for _ in range(2):
        call(kernel, torch.zeros(64))
    assert len(kernel.compiled) == 2
    assert not module._compiled
    kernel.hooked = False
    for _ in range(2):
        call(kernel, torch.zeros(64))
    assert len(kernel.compiled) == 3
    assert len(kernel.launched) == 4


def test_an_interpreted_kernel_is_called_as_it_is(monkeypatch):
    monkeypatch.setattr(module, "_compiled", {})
    kernel = Kernel()
    call(kernel, torch.zeros(64))
    call(kernel, torch.zeros(64))
    assert len(kernel.compiled) == 2
    assert not module._compiled


def tiles(dtype=torch.bfloat16, rows=64, columns=64, shape=(128, 128), swizzle=128):
    x = torch.zeros(shape, dtype=dtype)
    layout = NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=8 * x.element_size(), rank=2)
    return TensorDescriptor.from_tensor(x, [rows, columns], layout)


def ours(dtype=torch.bfloat16, rows=64, columns=64, shape=(128, 128)):
    return shared.tiles(torch.zeros(shape, dtype=dtype), shape[1], rows, columns)


ARGUMENTS = {
    **{f"{n}": n for n in (-1, 0, 1, 7, 16, 2**31 - 1, 2**31, 2**31 + 1, 2**40, 2**62, 2**63, 2**63 + 1)},
    **{repr(x): x for x in (None, True, False, 0.0, 1.0)},
    "fp32": buffer, "fp32, odd": buffer[1:], "fp32, 16 further": buffer[4:], "0-dim": torch.tensor(1.0),
    "bf16": torch.zeros(8, dtype=torch.bfloat16), "int64": torch.zeros(8, dtype=torch.int64),
    "tiles": tiles(), "tiles of fp16": tiles(torch.float16), "tiles of fp32": tiles(torch.float32),
    "fewer rows": tiles(rows=32), "more columns": tiles(columns=128), "another swizzle": tiles(swizzle=64),
    "of a smaller matrix": tiles(shape=(7, 64)),
    "ours": ours(), "ours, another": ours(shape=(3, 64, 192)), "ours of fp16": ours(torch.float16),
    "ours of fp32": ours(torch.float32), "ours, fewer rows": ours(rows=32), "ours, more columns": ours(columns=128),
}  # fmt: skip


@pytest.mark.skipif(not hasattr(jit, "native_specialize_impl"), reason="this Triton decides in another place")
@pytest.mark.parametrize("specialised", [True, False])
def test_kinds_are_at_least_as_fine_as_tritons_own(specialised):
    """What Triton itself would compile apart, also for parameters in do_not_specialize, is never one kind here."""
    backend = make_backend(GPUTarget("cuda", 90, 32))
    own = {name: jit.native_specialize_impl(backend, x, False, specialised, True) for name, x in ARGUMENTS.items()}
    apart = [pair for pair in itertools.combinations(ARGUMENTS, 2) if own[pair[0]] != own[pair[1]]]
    assert len(apart) > 200
    assert not [pair for pair in apart if module.kinds([ARGUMENTS[pair[0]]]) == module.kinds([ARGUMENTS[pair[1]]])]
