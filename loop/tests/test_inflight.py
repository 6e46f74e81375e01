"""Copies over an operand in flight are found in a kernel that has one, and not in the same kernel made safe."""

import pytest
import triton
import triton.language as tl

from loop import inflight, sm90


@triton.jit
def both_uses_kernel(a, b, o, s, N: tl.constexpr, STEPS: tl.constexpr, SAFE: tl.constexpr):
    """b feeds a product and, in registers, a sum."""
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    acc, total = tl.zeros([N, N], tl.float32), tl.zeros([N], tl.float32)
    for step in tl.range(0, STEPS, num_stages=3):
        b_a, b_b = tl.load(a + step * N * N + i * N + j), tl.load(b + step * N * N + i * N + j)
        total += tl.sum(b_b.to(tl.float32), 0)
        if SAFE:
            acc -= tl.dot(b_a, b_b)
        else:
            acc = tl.dot(b_a, b_b, acc)
    tl.store(o + i * N + j, acc)
    tl.store(s + tl.arange(0, N), total)


@pytest.fixture(scope="module")
def built():
    types = {"a": "*bf16", "b": "*bf16", "o": "*fp32", "s": "*fp32"}
    jobs = [(both_uses_kernel, types, {"N": 64, "STEPS": 16, "SAFE": safe}, 4, 3) for safe in (False, True)]
    return sm90.compile_each(jobs)


def test_a_load_used_in_registers_too_is_overwritten(built):
    """If this fails on a newer Triton, its pipeliner gives such a load a spare buffer: the waits may then go."""
    assert len(inflight.overwritten(built[0].ttgir)) == 1


def test_a_wait_before_the_copies_is_enough(built):
    assert "isAsync = true" in built[1].ttgir
    assert inflight.overwritten(built[1].ttgir) == []


def test_a_spare_buffer_is_enough(built):
    ring = inflight.overwritten(built[0].ttgir)[0].split(":")[0]
    alloc = f"{ring} = ttg.local_alloc : () -> !ttg.memdesc<2x"
    assert alloc in built[0].ttgir
    assert inflight.overwritten(built[0].ttgir.replace(alloc, alloc[:-2] + "3x")) == []
