"""Uninitialised memory made visible: inside `Poison`, what code under test allocates is NaN, between guard bands that
must survive.

`torch.empty` and its kin are patched; a call counts when a frame on its stack lies in the package, in an idea or in
`loop/controls` (so fla's allocations on behalf of a chain count too). Each such buffer lies in a larger one: band,
body, band. Bodies hold 0xFF bytes (NaN in every float format) or 0x7F in integers, so a value nobody wrote shows in
the outputs; bands that changed are writes out of bounds. `guarded` puts a given tensor between bands too: there a
read out of bounds yields NaN."""

import functools
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

BAND = 1 << 16  # bytes on either side: past any tile a kernel writes at once
FLOAT_BYTE, INT_BYTE = 0xFF, 0x7F
_TORCH = ("empty", "empty_like", "empty_strided")
_METHODS = ("new_empty", "new_empty_strided")


def under_test() -> tuple[str, ...]:
    """Folders whose code is under test: the installed package, the ideas, the negative controls."""
    import kernel_fun

    from . import registry

    folders = (Path(kernel_fun.__file__).parent, registry.root() / "ideas", Path(__file__).parent / "controls")
    return tuple(f"{f}/" for f in folders)


@dataclass
class Guarded:
    """A buffer between bands: the flat bytes it lives in, where its body starts and ends, the bands' fill, and who
    asked for it."""

    raw: torch.Tensor
    start: int
    end: int
    band_byte: int
    usual_byte: int
    label: str


class Poison:
    """Context manager. `body` and `band` choose the fill (None: NaN or 0x7F; a byte value otherwise), to tell causes
    apart.

    `trespassed()` names the buffers whose bands changed; call it after the work is done. `count` says how many
    buffers were poisoned. One at a time: entering a second one raises RuntimeError."""

    _active = None

    def __init__(self, folders: tuple[str, ...] | None = None, body: int | None = None, band: int | None = None):
        self.folders = under_test() if folders is None else tuple(folders)
        self.body, self.band = body, band
        self.buffers: list[Guarded] = []
        self._real = {}

    @property
    def count(self) -> int:
        return len(self.buffers)

    def __enter__(self) -> "Poison":
        if Poison._active is not None:
            raise RuntimeError("Poison is already active; leave it before entering another")
        Poison._active = self
        for owner, names in ((torch, _TORCH), (torch.Tensor, _METHODS)):
            for name in names:
                self._real[owner, name] = (getattr(owner, name), name in vars(owner))
                setattr(owner, name, self._patched(getattr(owner, name)))
        return self

    def __exit__(self, *error) -> None:
        for (owner, name), (real, own) in self._real.items():
            if own:
                setattr(owner, name, real)
            else:  # inherited: our attribute only hid it
                delattr(owner, name)
        self._real.clear()
        Poison._active = None

    def _patched(self, real):
        @functools.wraps(real)
        def allocate(*args, **kwargs):
            plain = real(*args, **kwargs)
            fixed = kwargs.get("out") is not None or kwargs.get("pin_memory")
            if fixed or not plain.numel() or plain.is_meta or plain.layout != torch.strided:
                return plain
            caller = self._caller()
            return plain if caller is None else self.surround(plain, caller)

        return allocate

    def _caller(self) -> str | None:
        """`file:line` of the nearest frame under test, None when there is none on the stack."""
        frame = sys._getframe(2)
        while frame is not None:
            path = frame.f_code.co_filename
            if path.startswith(self.folders):
                return f"{Path(path).parent.name}/{Path(path).name}:{frame.f_lineno}"
            frame = frame.f_back
        return None

    def surround(self, plain: torch.Tensor, label: str) -> torch.Tensor:
        """A poisoned tensor of `plain`'s size, strides, dtype and device, between bands."""
        view, guard = place(plain, label, self.band)
        _fill(guard.raw[guard.start : guard.end], plain.dtype, self.body)
        self.buffers.append(guard)
        return view.requires_grad_(plain.requires_grad)

    def trespassed(self) -> list[str]:
        return trespassed(self.buffers)


def _fill(raw: torch.Tensor, dtype: torch.dtype, byte: int | None) -> None:
    if dtype == torch.bool:
        byte = 1  # any other byte is no boolean
    elif byte is None:
        byte = FLOAT_BYTE if dtype.is_floating_point or dtype.is_complex else INT_BYTE
    raw.fill_(byte)


def place(like: torch.Tensor, label: str, band: int | None = None) -> tuple[torch.Tensor, Guarded]:
    """An uninitialised tensor with `like`'s size, strides, dtype and device, and the guard it lies in."""
    span = 1 + sum((n - 1) * s for n, s in zip(like.shape, like.stride(), strict=True)) if like.numel() else 0
    end = BAND + span * like.dtype.itemsize
    raw = torch.zeros(end + BAND + -end % 16, dtype=torch.uint8, device=like.device)
    floats = like.dtype.is_floating_point or like.dtype.is_complex
    usual = FLOAT_BYTE if floats else INT_BYTE
    byte = usual if band is None else band
    raw.fill_(byte)
    # not a view to autograd: the code under test may do with it what it may do with a tensor of its own
    tensor = torch.zeros(0, dtype=like.dtype, device=like.device)
    tensor.set_(raw.untyped_storage(), BAND // like.dtype.itemsize, like.shape, like.stride())
    return tensor, Guarded(raw, BAND, end, byte, usual, label)


def guarded(x: torch.Tensor, label: str, band: int | None = None) -> tuple[torch.Tensor, Guarded]:
    """A copy of `x` in the same strides between bands: reading past it gives NaN, writing past it shows."""
    view, guard = place(x, label, band)
    view.copy_(x)
    return view, guard


def refill_bands(buffers: list[Guarded], byte: int | None) -> None:
    """Give the bands of `buffers` another fill; None is the usual one, NaN or 0x7F."""
    for b in buffers:
        b.band_byte = b.usual_byte if byte is None else byte
        b.raw[: b.start].fill_(b.band_byte)
        b.raw[b.end :].fill_(b.band_byte)


def trespassed(buffers: list[Guarded]) -> list[str]:
    """Labels of the buffers with a byte changed outside their body, each with the side it happened on."""
    flags = [
        torch.stack([(b.raw[: b.start] != b.band_byte).any(), (b.raw[b.end :] != b.band_byte).any()]) for b in buffers
    ]
    if not flags:
        return []
    sides = torch.stack([f.cpu() for f in flags]) if len({f.device for f in flags}) > 1 else torch.stack(flags).cpu()
    return [
        f"{b.label} ({'before' if before else 'past'} its {'start' if before else 'end'})"
        for b, (before, after) in zip(buffers, sides.tolist(), strict=True)
        if before or after
    ]
