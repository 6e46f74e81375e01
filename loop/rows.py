"""The record: one JSON line per result, one file per run, appended and never edited.

A row says what was measured, on what, of which source, by which command, and whether it passed its check. A time
exists only in a row that passed: the schema refuses any other. `row_id` is a hash of the rest of the row, so a row
that was edited afterwards no longer answers to its name. Readers skip what they cannot read, and say which file.
"""

import hashlib
import json
import os
import re
import secrets
import warnings
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from loop.registry import BASELINE, root

SCHEMA = 1
Mode = Literal["fwd", "bwd", "fwdbwd", "fwd-loop", "bwd-loop", "fwdbwd-loop"]
MODES = get_args(Mode)
Kind = Literal["bench", "check", "firstcall", "run"]
Verdict = Literal["FASTER", "SAME", "SLOWER", "UNCLEAR"]
Status = Literal[
    "PASSED",
    "WRONG_VALUE",  # to WRONG_DTYPE: what a check found, as loop.verdict.Status says it
    "NON_FINITE",
    "UNWRITTEN",
    "OUT_OF_BOUNDS",
    "INPUT_MODIFIED",
    "NONDETERMINISTIC",
    "REUSED_RESULT",
    "WRONG_STREAM",
    "WRONG_DTYPE",
    "UNSUPPORTED",  # supports() said no, with the reason
    "IMPORT_ERROR",  # kernel.py does not import or is not a valid idea
    "NO_BASELINE",  # the arm is fine, but what it is compared with has no time
    "OOM",
    "IMPLAUSIBLE",  # faster than the floor allows: the timing or the floor is wrong
    "SOURCE_CHANGED",  # kernel.py was edited while it was being measured
    "KERNEL_DIED",  # a notebook's Python process died
    "EXITED",  # sys.exit in a cell: the cells after it were skipped
    "TIMEOUT",  # a cell took too long
    "RUNNER_TIMEOUT",  # the whole run took too long
    "RUNNER_DIED",  # the process that runs the notebook ended without a result
    "ERROR",  # the arm, or a notebook's cell, raised
    "NO_VERDICT",  # every cell ran and no verdict row was written
    "UNKNOWN_PARAMETER",
]

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]  # what shares and axes are divided by


class Part(BaseModel):
    """Base of everything in a row: frozen, and a field it does not know is an error (a typo, or another schema)."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class OutputError(Part):
    """Relative RMS error of one output against the fp64 oracle; None where it is not finite."""

    error: float | None
    limit: float | None  # what the error may be: the budget, tightened or widened by the baseline's own error
    budget: float
    baseline_error: float | None = None


class Check(Part):
    """What the check found. `findings` is empty when everything passed; `proofs` says what was shown."""

    ok: bool
    seeds: tuple[int, ...] = ()
    errors: dict[str, OutputError] = {}
    findings: tuple[str, ...] = ()
    proofs: dict[str, str] = {}
    protocol: str = ""


class Perf(Part):
    """Times in ms per call, bytes over the inputs. Ratios are baseline / arm: above 1 the arm is faster."""

    verdict: Verdict
    ratio: Positive
    ci_low: Positive
    ci_high: Positive
    coverage: float  # exact coverage of the interval
    dead_band: float
    aa_ratio: float  # the baseline against itself, in the same blocks
    aa_low: float
    aa_high: float
    cycles_ratio: float | None  # the ratio in SM cycles; None where the clocks are not known
    ms: Positive
    baseline_ms: Positive
    caller_ms: float | None  # one call as an idle caller sees it: launch latency included
    baseline_caller_ms: float | None
    floor_ms: float | None  # None on a device whose ceilings are not known
    floor_share: float | None  # floor_ms / ms
    floor_bound: str | None  # which limit sets the floor
    peak_bytes: int | None
    baseline_peak_bytes: int | None
    saved_bytes: int | None  # held between forward and backward, outputs excluded
    baseline_saved_bytes: int | None
    block_ms: tuple[float, ...]
    baseline_block_ms: tuple[float, ...]
    aa_block_ms: tuple[float, ...]
    calls_per_sample: int
    input_sets: int
    input_bytes: int  # of all sets together
    timer: Literal["graph", "eager", "loop", "cpu"]
    timer_note: str = ""  # why not a graph
    sm_mhz: tuple[int, ...] = ()  # one per block, of the arm
    baseline_sm_mhz: tuple[int, ...] = ()
    throttle: tuple[str, ...] = ()


class FirstCall(Part):
    """Seconds of the first call in a fresh process with empty kernel caches, import of the arm excluded."""

    fwd_s: float
    fwdbwd_s: float
    import_s: float
    second_fwdbwd_s: float  # the same call again, warm
    cached_fwd_s: float | None = None  # in another fresh process, which finds the caches that the first one left
    cached_fwdbwd_s: float | None = None


class Row(Part):
    """One result. `status` is PASSED or says how it failed; `perf` exists in PASSED bench rows and nowhere else."""

    schema_version: int = SCHEMA
    row_id: str = ""
    run_id: str
    utc: str
    kind: Kind
    family: str
    arm: str
    baseline: str | None = None
    case: str | None = None
    mode: Mode | None = None
    status: Status
    reason: str = ""
    device: str  # "cpu", or the GPU's name
    code_sha: str  # of the arm's own source
    baseline_sha: str | None = None
    chain_sha: str | None = None  # of the shipped chain that an idea was spliced into
    axes: dict[str, Any] = {}  # the case: shape, dtypes, flags, distribution
    stages: tuple[str, ...] = ()  # which source ran each step
    launches: dict[str, int] = {}  # kernels seen on the device in one call
    protocol: str = "v2"  # of loop.bench, where it says what v1 was
    check: Check | None = None
    perf: Perf | None = None
    firstcall: FirstCall | None = None
    env: dict[str, Any] = Field(default_factory=dict)
    cmd: str  # repeats this row
    notes: str = ""

    @model_validator(mode="after")
    def _times_only_when_passed(self):
        if self.status != "PASSED" and (self.perf or self.firstcall):
            raise ValueError(f"status {self.status} cannot carry a time")
        if self.status != "PASSED" and not self.reason:
            raise ValueError(f"status {self.status} needs a reason")
        if (self.perf or self.firstcall) and not (self.check and self.check.ok):
            raise ValueError("a time needs a check that passed in the same process")
        if (
            self.status == "PASSED"
            and self.kind == "bench"
            and not (self.perf and self.mode and self.baseline and self.case)
        ):
            raise ValueError("a passed bench row needs case, mode, baseline and perf")
        return self

    @property
    def verdict(self) -> str:
        """The verdict of a timed row, or an empty string."""
        return self.perf.verdict if self.perf else ""

    @property
    def git_dirty(self) -> bool:
        """True unless the environment says that the tree was clean."""
        return self.env.get("git_dirty") is not False


def content_id(row: dict) -> str:
    """Hash of a row's content without its id: 16 hex digits."""
    body = {key: value for key, value in row.items() if key != "row_id"}
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:16]


def seal(row: Row) -> Row:
    """The row with its `row_id` filled in."""
    return row.model_copy(update={"row_id": content_id(json.loads(row.model_dump_json()))})


def utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def new_run_id() -> str:
    """The run this process belongs to (LOOP_RUN_ID, set by the notebook runner), else a new one."""
    return os.environ.get("LOOP_RUN_ID") or f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(3)}"


def default_folder(family: str, device: str) -> Path:
    """Where rows go: `bench_logs/<family>`, kept in git; `out/bench_logs/<family>`, ignored by git, for a CPU's."""
    return root() / ("out/bench_logs" if device == "cpu" else "bench_logs") / family


class Writer:
    """Appends sealed rows to `<folder>/<run_id>-<label>.jsonl`, each in one synced write: a line is whole or absent.

    The file appears with its first row. An unwritable folder raises OSError here, before anything is measured.
    """

    def __init__(self, folder: Path | str, label: str, run_id: str | None = None):
        self.run_id = run_id or new_run_id()
        self.folder = Path(folder)
        self.path = self.folder / f"{self.run_id}-{re.sub(r'[^A-Za-z0-9._-]+', '_', label)[:60]}.jsonl"
        self.folder.mkdir(parents=True, exist_ok=True)
        probe = self.folder / f".{self.run_id}"
        probe.touch()
        probe.unlink()

    def write(self, row: Row) -> Row:
        row = seal(row)
        line = (row.model_dump_json() + "\n").encode()
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            before = os.fstat(fd).st_size
            if os.write(fd, line) != len(line):
                os.ftruncate(fd, before)
                raise OSError(f"{self.path}: no room for a row")
            os.fsync(fd)
        finally:
            os.close(fd)
        return row


def all_passed(found: Sequence[Row], asked: Iterable[str] | None = None) -> bool:
    """Did an arm that was asked for (None: any; fla itself only if nothing else was) pass, and none but decline?"""
    passed = {row.arm for row in found if row.status == "PASSED"}
    good = passed if asked is None else passed.intersection({*asked} - {BASELINE} or asked)
    return bool(good) and all(row.status in ("PASSED", "UNSUPPORTED") for row in found)


class SkippedRows(UserWarning):
    """A file held something that is not a row this version can read."""


def parse(text: str) -> Row:
    """A row from one line. ValueError says in one line what is wrong with it."""
    try:
        raw = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as err:
        raise ValueError("not JSON (cut short?)") from err
    if not isinstance(raw, dict) or "schema_version" not in raw:
        raise ValueError("not a row of this harness")
    if not isinstance(raw["schema_version"], int) or raw["schema_version"] > SCHEMA:
        raise ValueError(f"schema {raw['schema_version']} is newer than {SCHEMA}: update this checkout to read it")
    if content_id(raw) != raw.get("row_id"):
        raise ValueError("edited after it was written (row_id does not match)")
    try:
        return Row.model_validate_json(text)  # json itself lets half a surrogate pair through
    except ValidationError as err:
        first = err.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{where + ': ' if where else ''}{first['msg']}") from err


def read(*paths: Path | str) -> list[Row]:
    """All readable rows of the files and of the .jsonl files under the folders (default: all recorded), oldest first.

    What cannot be read is skipped with a SkippedRows warning that names file and line. A missing path holds no rows.
    """
    rows = []
    for path in _files(paths or (root() / "bench_logs", root() / "out" / "bench_logs")):
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as err:
            warnings.warn(f"{path}: skipped, {err}", SkippedRows, stacklevel=2)
            continue
        for number, line in enumerate(lines, 1):
            try:
                rows += [parse(line)] if line.strip() else []
            except ValueError as err:
                warnings.warn(f"{path}, line {number}: skipped, {err}", SkippedRows, stacklevel=2)
    return sorted(rows, key=lambda row: (row.utc, row.run_id))


def _files(paths: Iterable[Path | str]) -> Iterator[Path]:
    for path in map(Path, paths):
        if path.is_dir():
            yield from sorted(path.rglob("*.jsonl"))
        elif path.exists():
            yield path
