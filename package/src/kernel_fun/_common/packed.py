"""What `cu_seqlens` says on the host: sequences, chunks and where they lie, tokens covered.

Reading `cu_seqlens` from a GPU waits for the GPU, so the answer is kept with the tensor, and goes away with it. It is
made anew when the tensor's version counter has moved, as torch's in-place changes move it; and what can be read without
waiting, a `cu_seqlens` on the CPU or its copy there, is compared in value, because not every write moves the counter:
numpy's into shared memory and `torch.distributed`'s broadcasts do not. Steps get a copy of `cu_seqlens` made at the
same moment: fla keeps tables by a tensor's identity alone, and a backward must see what its forward saw. The copy and
the tables are int64 whatever the caller's integers are, so that no kernel meets, or is compiled for, a second kind.
"""
from typing import NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from . import support
from .problem import CHUNK


class Packed(NamedTuple):
    """Chunk tables of a packed call: `chunk_indices` [NT,2] is (sequence, chunk within it), `chunk_offsets` [N+1] the
    first chunk of each sequence.
    """

    N: int
    NT: int
    total: int                   # cu_seqlens[-1]; the call may hold more tokens than that
    starts_at_zero: bool
    cu_seqlens: torch.Tensor     # a copy; like the other two on the device of the original, and always int64
    chunk_indices: torch.Tensor
    chunk_offsets: torch.Tensor


_cache: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


class _Kept(NamedTuple):
    """Tables, and what they were made from: the version of `cu_seqlens` then, the values that were read, and whether
    those were the host's copy of values that are elsewhere.
    """

    version: int
    host: torch.Tensor
    believed: bool
    tables: Packed

    def holds(self, cu_seqlens: torch.Tensor, cu_seqlens_cpu: torch.Tensor | None) -> bool:
        """Are these the tables still? `cu_seqlens` is the tensor they are kept with."""
        if self.version != cu_seqlens._version or (self.believed and cu_seqlens_cpu is None):
            return False
        readable = (t for t in (cu_seqlens, cu_seqlens_cpu) if t is not None and t.is_cpu)
        return all(not t.is_floating_point() and torch.equal(t.long(), self.host.long()) for t in readable)


def describe(cu_seqlens: torch.Tensor, cu_seqlens_cpu: torch.Tensor | None = None, check=None) -> Packed:
    """Read `cu_seqlens` [N+1] (or its copy on the host, without waiting for the GPU; one that is not on the host is
    ignored). ValueError says what is wrong with it, or that the two differ: in shape, and, where `cu_seqlens` is on the
    CPU too, in their values.
    """
    if cu_seqlens_cpu is not None and not cu_seqlens_cpu.is_cpu:
        cu_seqlens_cpu = None
    if cu_seqlens.is_inference():  # counts no versions
        return _read(cu_seqlens, cu_seqlens_cpu, check)[1]
    kept = _cache.get(cu_seqlens)
    if kept is None or not kept.holds(cu_seqlens, cu_seqlens_cpu):
        version = cu_seqlens._version  # before reading: what is written meanwhile must not pass as read
        host, tables = _read(cu_seqlens, cu_seqlens_cpu, check)
        believed = cu_seqlens_cpu is not None and not cu_seqlens.is_cpu
        _cache[cu_seqlens] = kept = _Kept(version, host, believed, tables)
    return kept.tables


def _read(cu_seqlens: torch.Tensor, cu_seqlens_cpu: torch.Tensor | None, check=None) -> tuple[torch.Tensor, Packed]:
    """The values on the host, a copy, and the tables made from them: ordinary tensors, also where an evaluation under
    inference_mode is the first to ask, since a training step keeps them for its backward."""
    with torch.inference_mode(False):
        host = (cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu).detach().to("cpu", copy=True)
        if check is not None and host.dim() == 1 and host.numel():
            check(int(host[-1]))  # before tables of that length are made
        tables = _tables(host, cu_seqlens)
        if cu_seqlens_cpu is not None:
            _compare(cu_seqlens, host)
        return host, tables


def _compare(cu_seqlens: torch.Tensor, host: torch.Tensor) -> None:
    """ValueError when the host's copy is none, as far as that shows without waiting for a GPU."""
    if cu_seqlens.shape != host.shape:
        got = f"cu_seqlens_cpu is {list(host.shape)}, cu_seqlens {list(cu_seqlens.shape)}"
    elif cu_seqlens.is_cpu and not torch.equal(cu_seqlens.detach().to(host.dtype), host):
        got = f"cu_seqlens_cpu is {host.tolist()}, cu_seqlens {cu_seqlens.tolist()}"
    else:
        return
    raise ValueError(f"{got}: the one must be a copy of the other")


def of_call(name: str, x: torch.Tensor, cu_seqlens: torch.Tensor, cu_seqlens_cpu: torch.Tensor | None) -> Packed | str:
    """The tables of a call whose first tensor is `x` [B, T, ...], by the name `name`, or the reason to go to fla.
    ValueError for what is wrong on either path.
    """
    B, T = x.shape[:2]
    if B != 1:
        raise ValueError(f"{name} has B={B}: with cu_seqlens the sequences are packed along T of one row, B=1")
    if cu_seqlens.device != x.device:
        raise ValueError(f"cu_seqlens is on {cu_seqlens.device}, {name} on {x.device}: they must be on one device")
    if support.capturing(x):
        return "cu_seqlens under CUDA graph capture (its chunk tables would be frozen into the graph)"

    def check(end: int) -> None:
        if end > T:
            said = "cu_seqlens" if cu_seqlens_cpu is None else "cu_seqlens_cpu (as cu_seqlens should)"
            raise ValueError(f"{said} ends at {end}, but {name} has T={T} tokens")

    found = describe(cu_seqlens, cu_seqlens_cpu, check)
    check(found.total)
    return found if found.starts_at_zero else "cu_seqlens does not start at 0"


def _tables(host: torch.Tensor, like: torch.Tensor) -> Packed:
    if host.dim() != 1 or host.numel() < 2 or host.is_floating_point():
        raise ValueError(f"cu_seqlens must be integers [N+1] with N >= 1, got {host.dtype} {list(host.shape)}")
    host = host.long()
    lens = host.diff()
    if int(host[0]) < 0 or int(lens.min()) < 0:
        raise ValueError(f"cu_seqlens must start at 0 and never decrease, got {host.tolist()}")
    counts = lens.add(CHUNK - 1).div(CHUNK, rounding_mode="floor")
    first = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    # the device is named because torch.set_default_device may name another
    sequence = torch.repeat_interleave(torch.arange(lens.numel(), device="cpu"), counts)
    within = torch.arange(sequence.numel(), device="cpu") - first[sequence]
    return Packed(
        N=lens.numel(),
        NT=sequence.numel(),
        total=int(host[-1]),
        starts_at_zero=int(host[0]) == 0,
        cu_seqlens=like.detach().to(torch.int64, copy=True),
        chunk_indices=torch.stack([sequence, within], 1).to(like.device),
        chunk_offsets=first.to(like.device),
    )
