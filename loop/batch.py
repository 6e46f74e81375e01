"""The record of a batch: `OUT/nightly/RUN/batch.jsonl`, one line as each thing happens, so that a killed batch keeps
what it had.

Lines are objects with one of the keys `batch` (the first: what was asked for), `result`, `end` (the exit code) and
`accepted`. A line that was cut short is left out.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from loop import rows
from loop.run import RunResult, make_folder, rows_of

FILE = "batch.jsonl"
_FACTS = [f.name for f in fields(RunResult) if f.name != "rows"]


@dataclass(frozen=True)
class Done:
    """One result; `key` says what it depended on (`loop.fingerprint`), `kept` names the other batch that ran it."""

    result: RunResult
    key: Mapping[str, str]
    kept: str = ""


@dataclass
class Batch:
    """One batch, as far as it came. `code` is None until it has ended."""

    folder: Path
    facts: dict
    done: list[Done] = field(default_factory=list)
    code: int | None = None
    accepted: bool = False

    @property
    def id(self) -> str:
        return self.folder.name

    def add(self, done: Done) -> None:
        """Remember a result, on disk first."""
        facts = {name: getattr(done.result, name) for name in _FACTS}
        self._append({"result": facts, "key": dict(done.key), "kept": done.kept})
        self.done.append(done)

    def end(self, code: int) -> None:
        self._append({"end": code, "utc": rows.utc_now()})
        self.code = code

    def accept(self) -> None:
        """What later batches are compared with, from now on."""
        self._append({"accepted": rows.utc_now()})
        self.accepted = True

    def _append(self, line: dict) -> None:
        with open(self.folder / FILE, "a", encoding="utf-8") as f:
            f.write(json.dumps(line, default=str) + "\n")
            f.flush()
            os.fsync(f.fileno())


def start(base: Path, run_id: str, **facts) -> Batch:
    """A new batch under `base/nightly`. ValueError in one line when it cannot be written."""
    batch = Batch(make_folder(base / "nightly" / run_id), facts)
    batch._append({"batch": run_id, "utc": rows.utc_now(), **facts})
    return batch


def read(folder: Path) -> Batch:
    """A batch from its file. ValueError in one line when there is none."""
    try:
        text = (folder / FILE).read_text(encoding="utf-8")
    except OSError:
        raise ValueError(f"no batch {folder.name!r} under {folder.parent}") from None
    batch = Batch(folder, {})
    for line in text.splitlines():
        try:
            _take(batch, json.loads(line))
        except (ValueError, KeyError, TypeError):  # cut short, or of another version
            continue
    return batch


def _take(batch: Batch, line: dict) -> None:
    if "batch" in line:
        batch.facts = {key: value for key, value in line.items() if key != "batch"}
    elif "result" in line:
        facts = dict(line["result"])
        for name in ("notebook", "html"):
            facts[name] = Path(facts[name]) if facts[name] else None
        batch.done.append(Done(RunResult(**facts), line["key"], line["kept"]))
    elif "end" in line:
        batch.code = line["end"]
    elif "accepted" in line:
        batch.accepted = True


def earlier(base: Path) -> list[Batch]:
    """Every batch under `base/nightly`, oldest first."""
    return [read(path.parent) for path in sorted((base / "nightly").glob(f"*/{FILE}"))]


def accepted(batches: list[Batch]) -> dict[tuple[str, str], Done]:
    """(idea, case) -> its newest result in an accepted batch, with its rows: a batch of one idea leaves the others'."""
    found = {(d.result.idea, d.result.case): d for b in batches if b.accepted for d in b.done}
    for done in found.values():
        done.result.rows = rows_of(done.result.run_id)
    return found
