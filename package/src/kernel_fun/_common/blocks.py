"""PTX for CuTe kernels, continued from `ptx`: accesses with their offset in the instruction, [16,16] blocks of 16-bit
numbers between shared memory and warp matrix fragments, fp16 products, and inverses of unit lower-triangular blocks.

A block's eight fp32 of a thread are the two C fragments of its columns 0-7 and 8-15.
"""

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from . import ptx

_ptx = cute.arch.inline_ptx


# ------------------------------------------------------------------------------------------------------------- memory
def copy16(to, to_offset, address, offset, n):
    """Copy 16 bytes to shared memory without waiting, only the first n (0 or 16) of them, or all if n is None; zeros
    for the rest."""
    size, args = ("", []) if n is None else (", {$r2}", [n])
    _ptx(
        f"cp.async.cg.shared.global [{{$r0}}+{to_offset}], [{{$r1}}+{offset}], 16{size};",
        read_only_args=[to, address, *args],
    )


def wait_group(n):
    """All but this thread's last n groups of copies have landed."""
    _ptx(f"cp.async.wait_group {n};")


def store(kind, address, offset, x, p=None):
    """One to four registers to global memory, if p is not 0."""
    n = len(x)
    regs = ", ".join(f"{{$r{j + 1}}}" for j in range(n))
    regs, vec = (f"{{{regs}}}", f".v{n}") if n > 1 else (regs, "")
    code, args = f"st.global{vec}.{kind} [{{$r0}}+{offset}], {regs};", [address, *x]
    if p is not None:
        code, args = f"{{ .reg .pred p; setp.ne.s32 p, {{$r{n + 1}}}, 0; @p {code} }}", [*args, p]
    _ptx(code, read_only_args=args)


def sts4_if(p, addr, x):
    _ptx(
        "{ .reg .pred p; setp.ne.s32 p, {$r1}, 0; @p st.shared.v4.f32 [{$r0}], {{$r2}, {$r3}, {$r4}, {$r5}}; }",
        read_only_args=[addr, p, *x],
    )


def rows(addr):
    """Four 8x8 matrices, a lane giving the address of row lane % 8 of matrix lane / 8. With rows lane % 16, columns
    from lane / 16 * 8 on, they are a block's A fragment."""
    return _ptx(
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[addr],
    )


def put(addr, x):
    """The opposite of `rows`."""
    _ptx("stmatrix.sync.aligned.m8n8.x4.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[addr, *x])


def put_if(p, addr, x):
    """The same, if p, equal in the whole warp, is not 0; x None: zeros."""
    regs = "z, z, z, z" if x is None else "{$r2}, {$r3}, {$r4}, {$r5}"
    _ptx(
        "{ .reg .pred p; .reg .b32 z; mov.b32 z, 0; setp.ne.s32 p, {$r1}, 0; "
        + "@p stmatrix.sync.aligned.m8n8.x4.shared.b16 [{$r0}], {"
        + regs
        + "}; }",
        read_only_args=[addr, p, *(x or ())],
    )


# ------------------------------------------------------------------------------------------------------------ numbers
def pack_half(lo, hi):
    """fp16x2 of two fp32, `lo` in the low half."""
    return _ptx("cvt.rn.f16x2.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[hi, lo])


def mma16_half(c, a, b):
    """ptx.mma16 in fp16."""
    return _ptx(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, "
        "{{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};",
        write_only_types=[Float32] * 4,
        read_only_args=[*a, *b, *c],
    )


def leading_bits(x):
    """x cut to 11 significant bits, an fp16 number."""
    return _ptx("and.b32 {$w0}, {$r0}, 0xffffe000;", write_only_types=[Float32], read_only_args=[x])


def ex2_below(x):
    """2^-|x|"""
    return _ptx(
        "{ .reg .f32 d; abs.f32 d, {$r0}; neg.f32 d, d; ex2.approx.ftz.f32 {$w0}, d; }",
        write_only_types=[Float32],
        read_only_args=[x],
    )


def at_least(x, y):
    """max(x, y), NaN where x is."""
    return _ptx("max.NaN.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[x, Float32(y)])


def rsqrt(x):
    return _ptx("rsqrt.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def fma(a, b, c):
    return _ptx("fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Float32], read_only_args=[a, b, c])


def shuffle(x, lane):
    """x of another lane."""
    return _ptx(
        "shfl.sync.idx.b32 {$w0}, {$r0}, {$r1}, 0x1f, -1;", write_only_types=[Float32], read_only_args=[x, lane]
    )


# ---------------------------------------------------------------------------------------- unit lower-triangular blocks
# Products of blocks have operands of 11 significant bits, fp16, or (half False) of 16 bits and any range: bf16 and what
# it leaves, in three products.
def packed(x):
    """Pairs in bf16; of a block an A fragment."""
    return [ptx.pack(x[i], x[i + 1]) for i in range(0, len(x), 2)]


def operand(x, half):
    """A block as A fragments: [fp16] or [bf16, the rest]."""
    if half:
        return [[pack_half(x[i], x[i + 1]) for i in range(0, 8, 2)]]
    high = packed(x)
    kept = [y for h in high for y in ptx.unpack(h)]
    return [high, packed([a - b for a, b in zip(x, kept, strict=True)])]


def _product(c, a, b, half):
    """c += a b, eight columns; a from `operand`, b its parts' B fragments."""
    if half:
        return mma16_half(c, a[0], b[0])
    for i, j in ((0, 0), (0, 1), (1, 0)):
        c = ptx.mma16(c, a[i], b[j])
    return c


def product(c, a, places, half):
    """c + a B, B in shared memory as `put` left its parts at `places`."""
    b = [ptx.ldmatrix(at) for at in places]
    return [*_product(c[:4], a, [x[:2] for x in b], half), *_product(c[4:], a, [x[2:] for x in b], half)]


def _meeting(r, c, i):
    """Halfword mask of the pairs (c, r), (c + 1, r) of an 8x8 matrix that meet at half-size 2^i."""
    lo = Uint32(((r ^ c) >> i) == 1)
    hi = Uint32(((r ^ (c + 1)) >> i) == 1)
    return (Uint32(0) - lo) & Uint32(0xFFFF) | (Uint32(0) - hi) & Uint32(0xFFFF0000)


def invert(lower, r, c, half):
    """(I + L)^-1 from -L, a strictly lower block: A21 = -A22 L21 A11 for halves of 1, 2, 4 and 8 rows. r = lane / 4,
    c = lane % 4 * 2."""
    zero, none = Float32(0.0), Uint32(0)
    lower = [*lower[:4], zero, zero, *lower[6:]]
    t = [[None if i == 2 else ptx.transpose(p[i]) for i in range(4)] for p in operand(lower, half)]
    A = []  # the two 8x8 matrices on the diagonal; at first the inverse for halves of one row
    for e, x in ((0, lower[0]), (1, lower[1]), (0, lower[6]), (1, lower[7])):
        pair = ptx.pick(Int32((r >> 1) == ((c + e) >> 1)), x, zero)
        A.append(pair + ptx.pick(Int32(r == c + e), Float32(1.0), zero))
    for i in (1, 2):  # both at once: [A 0; 0 A'] [B; B']
        mask = _meeting(r, c, i)
        parts = operand([*A[:2], *[zero] * 4, *A[2:]], half)
        a = [(p[0], none, none, p[3]) for p in parts]
        x = _product(ptx.zeros(4), a, [(p[0] & mask, p[3] & mask) for p in t], half)
        x = [(p[0], none, none, p[3]) for p in operand([*x[:2], *[zero] * 4, *x[2:]], half)]
        A = _product(A, x, [(ptx.transpose(p[0]), ptx.transpose(p[3])) for p in parts], half)
    parts = operand([*A[:2], *[zero] * 4, *A[2:]], half)
    x = _product(ptx.zeros(4), [(p[3], none, none, none) for p in parts], [(p[1], none) for p in t], half)
    x = [(p[0], none, none, none) for p in operand([*x[:2], *[zero] * 6], half)]
    x = _product(ptx.zeros(4), x, [(ptx.transpose(p[0]), none) for p in parts], half)
    return [A[0], A[1], x[0], x[1], zero, zero, A[2], A[3]]


def inverse_row(own, here, places, half):
    """Row i of blocks of the inverse of [4,4] blocks, from its last block to its first: yields (j, A_ij), A_ij =
    -(sum over m of A_im L_mj) A_jj, zero for j > i. own: A_ii; here[j]: whether j is i; places: per part of `operand`,
    where L10, L20, L21, L30, L31, L32, A_00, A_11, A_22 are in shared memory."""
    zero = Float32(0.0)
    parts = {}
    for j in (3, 2, 1, 0):
        line = [ptx.pick(here[j], y, zero) for y in own]
        if j < 3:
            x = ptx.zeros(8)
            for m in range(j + 1, 4):
                x = product(x, parts[m], [at[m * (m - 1) // 2 + j] for at in places], half)
            line = product(line, operand([zero - y for y in x], half), [at[6 + j] for at in places], half)
        parts[j] = operand(line, half)
        yield j, line


# ------------------------------------------------------------------------------------------------------- tiles of rows
# 16-byte piece p of row x of a tile lies at x * 256 + (p ^ turned(x)) * 16: neither the same piece of eight rows nor
# four pieces of two rows share a bank.
def turned(x):
    """The low three bits of x, the lowest one moved to the top."""
    return (x % 2) * 4 + x // 2 % 4


def row_dots(rows16, other, lane, square):
    """x x (None unless `square`), x y and y y of rows lane / 4 and 8 further of two [16,128] bf16 tiles, at rows16 and
    `other` bytes on: the diagonals of products, in which 8 rows of x and of y meet 8 of each."""
    nth, row = lane // 8, lane % 8
    to, sums = rows16 + row * 256, [[ptx.zeros(4), ptx.zeros(4)] for _ in range(2)]
    spot_a = to + (nth % 2) * other + ((nth // 2) ^ turned(row)) * 16
    spot_b = to + (nth // 2) * other + ((nth % 2) ^ turned(row)) * 16
    for kk in range(8):
        for i in range(2):
            a, b = (rows((x ^ (kk * 32)) + i * 2048) for x in (spot_a, spot_b))
            if square:
                sums[i][0] = ptx.mma16(sums[i][0], a, b[:2])
            sums[i][1] = ptx.mma16(sums[i][1], a, b[2:])
    r = lane // 4
    diagonal = lambda x, e: shuffle(ptx.pick(r % 2, x[e + 1], x[e]), r * 4 + r // 2)  # noqa: E731
    return [(diagonal(x[0], 0) if square else None, diagonal(x[1], 0), diagonal(x[1], 2)) for x in sums]


# ------------------------------------------------------------------------------------------------ sums of eight rows
def times(x, *y):
    """Products of lists, element by element."""
    for z in y:
        x = [a * b for a, b in zip(x, z, strict=True)]
    return x


def middle_fragment(r, c, left):
    """A of the product that sums 16 rows' numbers in two groups of 8: those up to and including row r of its group,
    minus half of the group's, all times 2^-10. Rows from `left` on are left out."""
    sums = []
    for i in range(2):
        pair = []
        for e in range(2):
            up = Uint32(0) - Uint32(c + e <= r)
            x = Uint32(0x1000) & up | Uint32(0x9000) & ~up  # +-2^-11 in fp16
            pair.append(x & (Uint32(0) - Uint32(8 * i + c + e < left)))
        sums.append(pair[0] | (pair[1] << 16))
    return (sums[0], Uint32(0), Uint32(0), sums[1])


def sum_from_middle(a, x):
    """That product for eight columns; x: a thread's numbers in rows c, c + 1, c + 8, c + 9 of column r, below 2^16 in
    size, taken to 21 bits or 2^-25."""
    lead = [leading_bits(y) for y in x]
    rest = [y - z for y, z in zip(x, lead, strict=True)]
    e = ptx.zeros(4)
    for y in (lead, rest):
        e = mma16_half(e, a, (pack_half(y[0], y[1]), pack_half(y[2], y[3])))
    return e
