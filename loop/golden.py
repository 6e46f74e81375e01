"""Golden data: what fla itself gave on a GPU for a few small inputs, so that a CPU can hold the reference and the
oracle against it.

    python -m loop.golden --out loop/tests/golden        on a machine with a GPU; one .npz per case

Inputs are drawn by numpy's frozen generator on the CPU and made anew from the seed; only fla's results and gradients
are stored, bf16 as its bit pattern. A file names the case it belongs to by hash: one recorded for another meaning of
the case is refused."""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch

from . import inputs
from .cases import Case, ConvCase, Dist, KdaCase

FOLDER = Path(__file__).parent / "tests" / "golden"
SEED = 20260601
MAX_BYTES = 1_000_000  # of the whole folder
_KDA = {"H": 1, "K": 32, "V": 32, "why": "recorded from fla", "tags": frozenset({"golden"})}
_CONV = {"T": 40, "D": 32, "W": 4, "why": "recorded from fla", "tags": frozenset({"golden"})}
_STATE = {"h0": True, "ht": True}
_TRAIN = {"gate": "softplus", "g_dtype": "bf16", "l2norm": True}

CASES = (
    KdaCase(id="golden_gate", T=100, dist=Dist("rand", 2.0), **{**_KDA, "K": 64, "V": 64}, **_TRAIN),
    KdaCase(id="golden_log", B=2, T=70, **_STATE, **_KDA),
    KdaCase(id="golden_fp16", T=100, dtype="fp16", **_STATE, **_KDA),
    KdaCase(id="golden_safe", T=100, gate="safe", g_dtype="bf16", beta_dtype="bf16", beta_sigmoid=True, l2norm=True,
            **_KDA),
    KdaCase(id="golden_neg", T=70, beta_dtype="bf16", beta_sigmoid=True, neg_eigval=True, **_KDA),
    KdaCase(id="golden_gva", T=70, HV=3, **_TRAIN, **_KDA),
    KdaCase(id="golden_varlen", T=171, lengths=(70, 1, 100), **_STATE, **_TRAIN, **_KDA),
    KdaCase(id="golden_varlen_fp16", T=130, lengths=(64, 66), dtype="fp16", **{**_TRAIN, "g_dtype": "fp16"}, **_KDA),
    ConvCase(id="golden_conv", B=2, **_CONV),
    ConvCase(id="golden_conv_all", B=2, bias=True, residual=True, **_STATE, **_CONV),
    ConvCase(id="golden_conv_fp16", lengths=(40, 35), dtype="fp16", bias=True, **{**_CONV, "T": 75}),
    ConvCase(id="golden_conv_linear", B=2, activation=None, dtype="fp32", **{**_CONV, "W": 3}),
)  # fmt: skip


def given(case: Case) -> inputs.Inputs:
    """The inputs of a golden case, the same everywhere; on the CPU.

    A convolution's next step never reads the oldest of the W entries of its state, and fla 0.6 leaves that entry's
    gradient out of dx (ours adds it): here it is 0, so that both agree.
    """
    x = inputs.make(case, SEED, "cpu", inputs.NumpySampler)
    if case.family == "cconv" and x["dht"] is not None:
        x["dht"][..., 0] = 0
    return x


def record(folder: Path, op_of, device) -> list[Path]:
    """Run every case through `op_of(family)` on `device` and write one file each. Returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for case in CASES:
        x = given(case)
        x = x.like({n: None if t is None else t.to(device) for n, t in x.items()})
        found = inputs.run(op_of(case.family), x)
        bad = [n for n, t in found.items() if t is not None and not torch.isfinite(t).all()]
        if bad:
            raise RuntimeError(f"{case.id}: {bad[0]} is not finite; it was not written, the cases before it were")
        meta = {"case": case.id, "sha": case.sha, "seed": SEED, "versions": versions(device), "dtypes": _dtypes(found)}
        arrays = {n: _to_numpy(t) for n, t in found.items() if t is not None}
        path = folder / f"{case.id}.npz"
        np.savez_compressed(path, _meta=json.dumps(meta), **arrays)
        written.append(path)
    return written


def load(case: Case, folder: Path = FOLDER) -> tuple[dict, dict]:
    """(outputs by name, meta) as fla gave them. FileNotFoundError when not recorded; ValueError when of another case
    or seed."""
    with np.load(folder / f"{case.id}.npz", allow_pickle=False) as file:
        meta = json.loads(str(file["_meta"]))
        if (meta["sha"], meta["seed"]) != (case.sha, SEED):
            raise ValueError(
                f"{case.id} was recorded for another case or seed; on a GPU: python -m loop.golden --out {folder}"
            )
        return {n: _to_torch(file[n], meta["dtypes"][n]) for n in file.files if n != "_meta"}, meta


def versions(device) -> dict[str, str]:
    """What produced the numbers."""
    from importlib import metadata

    found = {n: metadata.version(n) for n in ("torch", "triton", "fla-core")}
    return found | {"device": torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else "cpu"}


def _dtypes(found: dict) -> dict[str, str]:
    return {n: str(t.dtype).removeprefix("torch.") for n, t in found.items() if t is not None}


def _to_numpy(t: torch.Tensor) -> np.ndarray:
    t = t.detach().cpu().contiguous()
    return t.view(torch.int16).numpy() if t.dtype == torch.bfloat16 else t.numpy()


def _to_torch(array: np.ndarray, dtype: str) -> torch.Tensor:
    t = torch.from_numpy(array)
    return t.view(torch.bfloat16) if dtype == "bfloat16" else t


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m loop.golden", description="Record fla's results for the CPU tests, on a GPU."
    )
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder for the .npz files (default: %(default)s)")
    out = parser.parse_args(argv).out
    if not torch.cuda.is_available():
        print("golden data comes from fla, which needs a GPU; torch finds none here", file=sys.stderr)
        return 1
    from . import arms

    files = record(out, lambda family: arms.make(family, "000").op, "cuda")
    total = sum(f.stat().st_size for f in files)
    print(f"{len(files)} files, {total / 1e3:.0f} kB in {out}")
    if total > MAX_BYTES:
        print(f"more than the {MAX_BYTES / 1e3:.0f} kB that the repository holds", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
