"""PTX for CuTe kernels, an instruction a function: memory in and out of registers, bf16 pairs, warp matrix products.

A warp matrix fragment follows the PTX layout: lane l holds rows l / 4 and l / 4 + 8, columns 2 (l % 4) and the next.
bf16 values travel in
pairs, the lower column in the low half. Global addresses are a 64-bit base and a 32-bit element index, one
multiply-add together.
"""

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

_ptx = cute.arch.inline_ptx


# A global access is base + index * size: a 64-bit base of the chunk and a 32-bit index cost one multiply-add.
def load(kind, n, dtype, base, i, size):
    regs = ", ".join(f"{{$w{x}}}" for x in range(n))
    regs, vec = (f"{{{regs}}}", f".v{n}") if n > 1 else (regs, "")
    return _ptx(
        f"{{ .reg .s64 a; mad.wide.s32 a, {{$r1}}, {size}, {{$r0}}; ld.global{vec}.{kind} {regs}, [a]; }}",
        write_only_types=[dtype] * n,
        read_only_args=[base, i],
    )


def store(kind, base, i, size, *x):
    regs = ", ".join(f"{{$r{j + 2}}}" for j in range(len(x)))
    regs, vec = (f"{{{regs}}}", f".v{len(x)}") if len(x) > 1 else (regs, "")
    _ptx(
        f"{{ .reg .s64 a; mad.wide.s32 a, {{$r1}}, {size}, {{$r0}}; st.global{vec}.{kind} [a], {regs}; }}",
        read_only_args=[base, i, *x],
    )


def prefetch(base, i, size):
    _ptx(
        f"{{ .reg .s64 a; mad.wide.s32 a, {{$r1}}, {size}, {{$r0}}; prefetch.global.L2 [a]; }}",
        read_only_args=[base, i],
    )


def ld4(base, i):
    """Four fp32 at element i."""
    return load("f32", 4, Float32, base, i, 4)


def ld2(base, i):
    """Four bf16 at element i, in two packed registers."""
    return load("b32", 2, Uint32, base, i, 2)


def st4(base, i, x):
    store("f32", base, i, 4, *x)


def st2(base, i, x):
    """Four fp32 as bf16 at element i."""
    store("b32", base, i, 2, pack(x[0], x[1]), pack(x[2], x[3]))


def copy_async(to, base, i, size, n):
    """Copy n bytes (8 or 16) from element i to shared memory without waiting; see `commit` and `wait_all`."""
    _ptx(
        f"{{ .reg .s64 a; mad.wide.s32 a, {{$r1}}, {size}, {{$r0}}; cp.async.ca.shared.global [{{$r2}}], [a], {n}; }}",
        read_only_args=[base, i, to],
    )


def commit():
    _ptx("cp.async.commit_group;")


def wait_all():
    """This thread's copies have landed; a barrier makes them visible to others."""
    _ptx("cp.async.wait_all;")


def sts(addr, x):
    _ptx("st.shared.b32 [{$r0}], {$r1};", read_only_args=[addr, x])


def sts1(addr, x):
    _ptx("st.shared.f32 [{$r0}], {$r1};", read_only_args=[addr, x])


def lds1(addr):
    return _ptx("ld.shared.f32 {$w0}, [{$r0}];", write_only_types=[Float32], read_only_args=[addr])


def sts4(addr, x):
    _ptx("st.shared.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[addr, *x])


def sts_frag(addr, x):
    _ptx("st.shared.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[addr, *x])


def lds_frag(addr):
    return _ptx(
        "ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];", write_only_types=[Uint32] * 4, read_only_args=[addr]
    )


def lds2(addr):
    """Four bf16 in two packed registers."""
    return _ptx("ld.shared.v2.b32 {{$w0}, {$w1}}, [{$r0}];", write_only_types=[Uint32] * 2, read_only_args=[addr])


def lds4(addr):
    return _ptx(
        "ld.shared.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];", write_only_types=[Float32] * 4, read_only_args=[addr]
    )


def pack(lo, hi):
    """bf16x2 of two fp32, `lo` in the low half."""
    return _ptx("cvt.rn.bf16x2.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[hi, lo])


def unpack(x):
    lo = _ptx("shl.b32 {$w0}, {$r0}, 16;", write_only_types=[Uint32], read_only_args=[x])
    hi = _ptx("and.b32 {$w0}, {$r0}, 0xffff0000;", write_only_types=[Uint32], read_only_args=[x])
    as_float = lambda y: _ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[y])  # noqa: E731
    return as_float(lo), as_float(hi)


def decay(a, b):
    """2^-|a - b|: the one exponential of the kernel, never above 1."""
    return _ptx(
        "{ .reg .f32 d; sub.f32 d, {$r0}, {$r1}; abs.f32 d, d; neg.f32 d, d; ex2.approx.ftz.f32 {$w0}, d; }",
        write_only_types=[Float32],
        read_only_args=[a, b],
    )


def decay_exponent(x):
    """-|x| in log2 units."""
    return _ptx(
        "{ .reg .f32 d; abs.f32 d, {$r0}; mul.f32 {$w0}, d, 0fBFB8AA3B; }",
        write_only_types=[Float32],
        read_only_args=[x],
    )


def ex2(x):
    return _ptx("ex2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def lg2(x):
    return _ptx("lg2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def rcp(x):
    return _ptx("rcp.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def pick(flag, a, b):
    """a where the integer flag is not 0, else b."""
    return _ptx(
        "{ .reg .pred p; setp.ne.s32 p, {$r0}, 0; selp.f32 {$w0}, {$r1}, {$r2}, p; }",
        write_only_types=[Float32],
        read_only_args=[flag, a, b],
    )


def transpose(x):
    """The 8x8 bf16 matrix whose rows the warp's lanes hold in pairs, transposed."""
    return _ptx("movmatrix.sync.aligned.m8n8.trans.b16 {$w0}, {$r0};", write_only_types=[Uint32], read_only_args=[x])


def mma16(c, a, b):
    """c += a b with a [16,16], b [16,8] in bf16, c [16,8] in fp32."""
    return _ptx(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, "
        "{{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};",
        write_only_types=[Float32] * 4,
        read_only_args=[*a, *b, *c],
    )


def mma8(c, a, b):
    """c += a b with a [16,8], b [8,8] in bf16, c [16,8] in fp32."""
    return _ptx(
        "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, {{$r0}, {$r1}}, {{$r2}}, "
        "{{$r3}, {$r4}, {$r5}, {$r6}};",
        write_only_types=[Float32] * 4,
        read_only_args=[*a, b, *c],
    )


def ldmatrix(addr):
    """B fragments of a [16 rows, 16 columns] tile: two for each block of 8 columns."""
    return _ptx(
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[addr],
    )


def zeros(n):
    return [Float32(0.0)] * n


# ------------------------------------------------------------ addresses that need no arithmetic, predicates on a row
# A global access is address + off, `off` a literal in bytes. `left` is how many rows there are from the thread's own
# one on; `row` is a literal, and the row exists if row < left.
def copy(to, address, n, l2=""):
    """Copy n bytes (8 or 16) to shared memory without waiting; l2: what L2 should fetch with it, as ".L2::128B"."""
    cache = "cg" if n == 16 else "ca"
    _ptx(f"cp.async.{cache}.shared.global{l2} [{{$r0}}], [{{$r1}}], {n};", read_only_args=[to, address])


def copy_row(to, address, off, n, left, row, l2=""):
    """The same, but zeros where the row does not exist."""
    cache = "cg" if n == 16 else "ca"
    _ptx(
        f"{{ .reg .pred p; setp.le.s32 p, {{$r2}}, {row}; "
        f"cp.async.{cache}.shared.global{l2} [{{$r0}}], [{{$r1}}+{off}], {n}, p; }}",
        read_only_args=[to, address, left],
    )


def wait_group(n):
    """All but this thread's last n groups of copies have landed."""
    _ptx(f"cp.async.wait_group {n};")


def sync_warp():
    _ptx("bar.warp.sync -1;")


def sync_cta():
    _ptx("bar.sync 0;")


def load_row(kind, n, dtype, address, off, left, row):
    """n registers from a row, zeros where it does not exist."""
    regs = ", ".join(f"{{$w{x}}}" for x in range(n))
    target, vec = (f"{{{regs}}}", f".v{n}") if n > 1 else (regs, "")
    clear = " ".join(f"mov.b32 {{$w{x}}}, 0;" for x in range(n))
    return _ptx(
        f"{{ .reg .pred p; {clear} setp.gt.s32 p, {{$r1}}, {row}; "
        f"@p ld.global{vec}.{kind} {target}, [{{$r0}}+{off}]; }}",
        write_only_types=[dtype] * n,
        read_only_args=[address, left],
    )


def store_row(kind, address, off, left, row, *x):
    regs = ", ".join(f"{{$r{j + 2}}}" for j in range(len(x)))
    regs, vec = (f"{{{regs}}}", f".v{len(x)}") if len(x) > 1 else (regs, "")
    _ptx(
        f"{{ .reg .pred p; setp.gt.s32 p, {{$r1}}, {row}; @p st.global{vec}.{kind} [{{$r0}}+{off}], {regs}; }}",
        read_only_args=[address, left, *x],
    )


def sts2(addr, x):
    _ptx("st.shared.v2.f32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[addr, *x])


def lds2f(addr):
    return _ptx("ld.shared.v2.f32 {{$w0}, {$w1}}, [{$r0}];", write_only_types=[Float32] * 2, read_only_args=[addr])


def ldmatrix_n(addr, n, transposed):
    """n (2 or 4) 8x8 bf16 matrices, a register each; lane 8 i + r has the address of row r of the i-th. Transposed, the
    registers hold the transposed matrices."""
    trans = ".trans" if transposed else ""
    regs = ", ".join(f"{{$w{x}}}" for x in range(n))
    return _ptx(
        f"ldmatrix.sync.aligned.m8n8.x{n}{trans}.shared.b16 {{{regs}}}, [{{$r0}}];",
        write_only_types=[Uint32] * n,
        read_only_args=[addr],
    )


# --------------------------------------------------------------------------------- eight rows of a warp: lane / 4
def sum_later_rows(x):
    """The sum over this and the later ones of the eight rows."""
    step = "shfl.sync.down.b32 y|p, {{$w0}}, {0}, 0x1f, -1; @p add.f32 {{$w0}}, {{$w0}}, y; "
    return _ptx(
        "{ .reg .pred p; .reg .f32 y; mov.f32 {$w0}, {$r0}; " + "".join(step.format(n) for n in (4, 8, 16)) + "}",
        write_only_types=[Float32],
        read_only_args=[x],
    )


def of_row(x, row):
    """x of one of the eight rows."""
    return _ptx(
        f"shfl.sync.idx.b32 {{$w0}}, {{$r0}}, {4 * row}, 0x31f, -1;", write_only_types=[Float32], read_only_args=[x]
    )


def exchange(x, lanes):
    """x of the lane whose number differs by the bits `lanes`."""
    return _ptx(
        f"shfl.sync.bfly.b32 {{$w0}}, {{$r0}}, {lanes}, 0x1f, -1;", write_only_types=[Float32], read_only_args=[x]
    )


def sum_lanes(x, *steps):
    for step in steps:
        x = x + exchange(x, step)
    return x


def bound_exponents(e, step, limit):
    """Exponents that fall over the eight rows, and are 0 in row 3: as they are, where all of the warp's are within
    `limit` of 0; else after every fall from a row to the next above `step` has been made `step`, and relative to the
    middle between rows 3 and 4."""
    n = len(e)
    r, w = [f"{{$r{i}}}" for i in range(n)], [f"{{$w{i}}}" for i in range(n)]
    code = [f"{{ .reg .pred p, q; .reg .f32 m, x, y, z; abs.f32 m, {r[0]};"]
    code += [f"abs.f32 x, {x}; max.f32 m, m, x;" for x in r[1:]]
    code += [f"mov.f32 {x}, {y};" for x, y in zip(w, r, strict=True)]
    code.append(f"setp.gt.f32 p, m, {float(limit)}; vote.sync.any.pred q, p, -1; @!q bra.uni BOUNDED;")
    for x, y in zip(r, w, strict=True):
        code.append(f"shfl.sync.up.b32 y|p, {x}, 4, 0, -1; sub.f32 x, y, {x}; sub.f32 x, x, {float(step)};")
        code.append("max.f32 x, x, 0f00000000; selp.f32 x, x, 0f00000000, p;")
        code += [f"shfl.sync.up.b32 y|p, x, {lanes}, 0, -1; @p add.f32 x, x, y;" for lanes in (4, 8, 16)]
        code.append(f"add.f32 x, x, {x}; shfl.sync.idx.b32 y, x, 12, 0x31f, -1; shfl.sync.idx.b32 z, x, 16, 0x31f, -1;")
        code.append(f"add.f32 y, y, z; fma.rn.f32 {y}, y, 0fBF000000, x;")
    code.append("BOUNDED: }")
    return _ptx(" ".join(code), write_only_types=[Float32] * n, read_only_args=[*e])


def larger(x, y):
    return _ptx("max.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[x, y])


def at_most(x, n):
    """min with a literal: a float, or an integer."""
    kind, dtype = ("f32", Float32) if isinstance(n, float) else ("s32", Int32)
    return _ptx(f"min.{kind} {{$w0}}, {{$r0}}, {n};", write_only_types=[dtype], read_only_args=[x])
