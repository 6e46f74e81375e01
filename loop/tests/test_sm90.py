"""Kernels compile for sm_90 with no GPU, one after the other in a process that outlives what goes wrong in one."""

import pytest
import triton
import triton.language as tl

from loop import sm90
from loop.tests.test_interpreter import dot_kernel

TYPES, SHAPE = {"a": "*bf16", "b": "*bf16", "o": "*fp32"}, {"M": 64, "N": 64, "K": 64}
LOUD = '''"""A kernel module that prints, and one that ends its process."""
import os, sys
import triton
import triton.language as tl

print("this is no answer")
if END:
    os._exit(7)


@triton.jit
def loud_kernel(o):
    tl.store(o, 1.0)
'''


@triton.jit
def spilling_kernel(x, o, N: tl.constexpr):
    i = tl.arange(0, N)
    b_x = tl.load(x + i[:, None] * N + i[None, :])
    tl.store(o + i[:, None] * N + i[None, :], tl.dot(tl.trans(b_x), b_x) + b_x)


def test_registers_spills_and_code_are_read():
    spilling = (spilling_kernel, {"x": "*fp32", "o": "*fp32"}, {"N": 128}, 4, 1, {"maxnreg": 96})
    small, large = sm90.compile_each([(dot_kernel, TYPES, SHAPE, 4, 1), spilling])
    assert small.spills == 0
    assert 16 <= small.regs <= 255
    assert small.smem > 0
    assert ".target sm_90" in small.ptx
    assert "HGMMA" in small.sass
    assert large.spills > 0
    assert large.regs == 96


def test_the_argument_that_is_missing_is_named():
    with pytest.raises(ValueError, match=r"dot_kernel.*'K'"):
        sm90.compile_one(dot_kernel, TYPES, {"M": 64, "N": 64})


def test_the_compilers_message_is_handed_on_and_the_next_kernel_compiles():
    with pytest.raises(RuntimeError, match=r"dot_kernel for sm_90 failed:\n(.|\n)*power of"):
        sm90.compile_one(dot_kernel, TYPES, SHAPE | {"M": 48})
    process = sm90._child[0]
    assert sm90.compile_one(dot_kernel, TYPES, SHAPE).regs >= 16
    assert sm90._child[0] is process


@pytest.mark.parametrize("end", [False, True])
def test_a_module_may_print_and_one_that_ends_the_process_is_an_error(end, tmp_path):
    path = tmp_path / "loud.py"
    path.write_text(LOUD.replace("END", str(end)))

    def loud_kernel(o):
        """Found by name in the file that says it is there."""

    loud_kernel.__code__ = loud_kernel.__code__.replace(co_filename=str(path))
    if end:
        with pytest.raises(RuntimeError, match=r"loud_kernel for sm_90 failed:\n(.|\n)*exit code 7"):
            sm90.compile_one(loud_kernel, {"o": "*fp32"}, {})
        return
    assert sm90.compile_one(loud_kernel, {"o": "*fp32"}, {}).spills == 0
