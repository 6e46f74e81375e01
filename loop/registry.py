"""Finds the ideas and loads their kernels: always the file as it is now, never a build of what it was.

An idea is a folder `ideas/NNN-slug` with a `kernel.py`; 000 is fla itself and has none. A kernel that does not import
or breaks a rule is still listed, with its error in one line. Loading compiles the bytes that were hashed, under a
module name that carries the hash: a notebook's re-run picks up an edit, and Triton's and CuTe's per-function caches
start afresh.
"""

import contextlib
import difflib
import hashlib
import importlib
import inspect
import linecache
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from loop import apart, rules
from loop.rules import IdeaError, check_source

FAMILIES = ("kda", "cconv")
BASELINE = "000"
_FOLDER = re.compile(r"(\d{3})-([a-z0-9]+(?:-[a-z0-9]+)*)")
IMPORT_SECONDS = 60.0  # for one kernel.py; CuTe alone takes a few
_loaded: dict[Path, tuple[str, ModuleType]] = {}
_lost: dict[Path, tuple[str, str]] = {}  # kernel.py -> the hash of a source that ended its process, and how


@dataclass(frozen=True)
class Idea:
    """One folder under `ideas/`. `error` says in one line why its kernel cannot be used; None when it can."""

    id: str
    slug: str
    folder: Path
    family: str | None
    spans: tuple[str, ...]
    error: str | None

    @property
    def name(self) -> str:
        return f"{self.id}-{self.slug}"

    @property
    def kernel(self) -> Path:
        return self.folder / "kernel.py"


def root() -> Path:
    """The repository: LOOP_ROOT (tests point it at a copy), else the checkout this file lies in."""
    return Path(os.environ.get("LOOP_ROOT") or Path(__file__).resolve().parents[1])


def folders() -> dict[str, Path]:
    """Idea id -> folder, in order. IdeaError when two folders share a number: numbers are never reused."""
    found: dict[str, Path] = {}
    for path in sorted((root() / "ideas").glob("[0-9]*")):
        match = _FOLDER.fullmatch(path.name)
        if match and path.is_dir():
            if match[1] in found:
                raise IdeaError(
                    f"ideas/{found[match[1]].name} and ideas/{path.name} share a number; numbers are never reused"
                )
            found[match[1]] = path
    return found


def folder(idea_id: str) -> Path:
    """The folder of an idea, by its number or its whole name. IdeaError names the closest ones."""
    known = folders()
    if idea_id in known:
        return known[idea_id]
    for path in known.values():
        if path.name == idea_id:
            return path
    names = [path.name for path in known.values()]
    raise IdeaError(
        f"no idea {idea_id!r}{closest(idea_id, [*known, *names])}; ideas are {', '.join(names) or 'none yet'}"
    )


def closest(word: str, options) -> str:
    """A "did you mean" for a message, or nothing."""
    near = difflib.get_close_matches(word, list(options), n=3, cutoff=0.5)
    return f" (did you mean {' or '.join(near)}?)" if near else ""


def all_ideas(names: Iterable[str] = ()) -> list[Idea]:
    """Every idea, or those of these numbers or names, in order; also the broken ones.

    What a kernel.py does as it loads must not end a batch or a page: each is first loaded in a process of its own.
    """
    wanted = {folder(name).name for name in names}
    listed = [path for path in folders().values() if not wanted or path.name in wanted]
    return [find(path.name, survives=_survives) for path in listed]


def find(idea_id: str, survives: Callable[[str], None] = lambda number: None) -> Idea:
    """One idea, with its error instead of an exception when its kernel cannot be used."""
    idea = glance(idea_id)
    if idea.id == BASELINE:
        return idea
    try:
        survives(idea.id)
        module = load(idea.id)
        return replace(idea, family=module.FAMILY, spans=tuple(module.SPANS))
    except IdeaError as err:
        return replace(idea, error=str(err))


def glance(idea_id: str) -> Idea:
    """One idea as its folder and IDEA.md name it; its kernel is not looked at."""
    path = folder(idea_id)
    number, _, slug = path.name.partition("-")
    return Idea(number, slug, path, front_matter(path).get("family"), (), None)


def _survives(idea_id: str) -> None:
    """IdeaError when loading the kernel ends its process or never comes to an end. Any other error is `load`'s to say.
    """
    path = folder(idea_id) / "kernel.py"
    sha = hashlib.sha256(_source(path.parent)).hexdigest()
    if _loaded.get(path, ("",))[0] == sha:
        return

    def attempt():
        with contextlib.suppress(IdeaError):
            load(idea_id)

    if _lost.get(path, ("",))[0] != sha:
        try:
            apart.apart(attempt, IMPORT_SECONDS)
            return
        except apart.Lost as err:
            _lost[path] = (sha, f"ideas/{path.parent.name} does not import: kernel.py {err}")
    raise IdeaError(_lost[path][1])


def source_sha(idea_id: str) -> str:
    """sha256 of the idea's kernel.py as it is now."""
    return hashlib.sha256(_source(folder(idea_id))).hexdigest()


def load(idea_id: str) -> ModuleType:
    """The idea's kernel module, built anew whenever kernel.py changed. IdeaError in one line when it cannot be used."""
    path = folder(idea_id) / "kernel.py"
    source = _source(path.parent)
    sha = hashlib.sha256(source).hexdigest()
    known = _loaded.get(path)
    if known and known[0] == sha:
        return known[1]
    name = f"idea_{path.parent.name[:3]}_{sha[:12]}"
    check_source(source, path)
    module = _execute(source, path, name)
    validate(module, path)
    _loaded[path] = (sha, module)
    return module


def fresh(idea_id: str) -> ModuleType:
    """The idea's kernel module, built for the caller alone, who may set its constants."""
    path = folder(idea_id) / "kernel.py"
    source = _source(path.parent)
    check_source(source, path)
    return _execute(source, path, f"idea_{path.parent.name[:3]}_alone")


def loaded_sha(kernel: Path) -> str:
    """sha256 of the source that the module now loaded from that kernel.py was built from."""
    return _loaded[kernel][0]


def _source(folder: Path) -> bytes:
    try:
        return (folder / "kernel.py").read_bytes()
    except FileNotFoundError:
        why = "is fla itself and has no kernel" if folder.name.startswith(BASELINE) else "has no kernel.py"
        raise IdeaError(f"ideas/{folder.name} {why}") from None
    except OSError as err:
        raise IdeaError(f"ideas/{folder.name}/kernel.py cannot be read: {err.strerror}") from None


def _execute(source: bytes, path: Path, name: str) -> ModuleType:
    """Run the source as a module of that name. Not through import: its bytecode cache tells files apart by whole
    seconds.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        from loop import interpreter

        interpreter.install()
    module = ModuleType(name)
    module.__file__ = str(path)
    module.__spec__ = ModuleSpec(name, loader=None, origin=str(path))
    linecache.cache.pop(str(path), None)  # Triton reads a kernel's source through it
    sys.modules[name] = module
    try:
        exec(compile(source, str(path), "exec"), module.__dict__)
    except (Exception, SystemExit) as err:
        sys.modules.pop(name, None)
        raise IdeaError(f"ideas/{path.parent.name} does not import: {where(err, path)}") from err
    return module


def where(err: BaseException, path: Path) -> str:
    """`kernel.py:12: NameError: ...` from an exception's traceback, in one line."""
    lines = [frame.lineno for frame in traceback.extract_tb(err.__traceback__) if frame.filename == str(path)]
    at = f"kernel.py:{lines[-1]}: " if lines else ""
    return f"{at}{type(err).__name__}: {' '.join(str(err).split())[:300]}"


def validate(module: ModuleType, path: Path) -> None:
    """FAMILY, SPANS, WRITES and supports, against the family's chain. IdeaError in one line."""
    from kernel_fun._common import plan

    where = f"ideas/{path.parent.name}/kernel.py"
    family, spans = getattr(module, "FAMILY", None), getattr(module, "SPANS", None)
    if family not in FAMILIES:
        raise IdeaError(f"{where}: FAMILY={family!r}; accepted are {', '.join(map(repr, FAMILIES))}")
    if not isinstance(spans, dict) or not spans or not all(callable(fn) for fn in spans.values()):
        raise IdeaError(f"{where}: SPANS={spans!r}; give a dict of span -> function, e.g. {{'bwd.intra': run}}")
    if not callable(getattr(module, "supports", None)):
        raise IdeaError(f"{where}: no supports(p); give one that returns (True, '') or (False, reason)")
    chain = importlib.import_module(f"kernel_fun.{family}.chain")
    tensors = {*chain.INPUTS, *chain.OUTPUTS, *(t for s in chain.STAGES for t in (*s.reads, *s.writes))}
    seen: dict[str, str] = {}
    for span, fn in spans.items():
        try:
            stages = plan.parse_span(span, chain.STAGES)
        except ValueError as err:
            raise IdeaError(f"{where}: {err}") from None
        for stage in stages:
            if stage in seen:
                raise IdeaError(f"{where}: spans {seen[stage]!r} and {span!r} both hold {stage}")
            seen[stage] = span
        _validate_function(fn, span, tensors | plan.META, where)
    for span, names in getattr(module, "WRITES", {}).items():
        unknown = [n for n in names if n not in tensors]
        if span not in spans or unknown:
            what = f"tensor {unknown[0]!r}" if unknown else f"span {span!r}, which SPANS does not have"
            raise IdeaError(f"{where}: WRITES names {what}")


def _validate_function(fn, span: str, known: set[str], where: str) -> None:
    from kernel_fun._common import plan

    for parameter in inspect.signature(fn).parameters.values():
        if parameter.kind is not parameter.KEYWORD_ONLY:
            what = f"the function of span {span!r} takes {parameter.name!r} by position"
            raise IdeaError(f"{where}: {what}; make all its arguments keyword-only")
        if parameter.name == plan.WANTED:
            if parameter.default is parameter.empty:
                raise IdeaError(f"{where}: {plan.WANTED!r} in the function of span {span!r} must have a default")
        elif parameter.name not in known:
            raise IdeaError(
                f"{where}: the function of span {span!r} reads {parameter.name!r}, which the chain does not have"
                f"{closest(parameter.name, known)}"
            )


def supports(module: ModuleType, p) -> tuple[bool, str]:
    """What the idea's supports(p) says. IdeaError in one line when it raises or returns anything else."""
    path = Path(module.__file__)
    at = f"ideas/{path.parent.name}/kernel.py: supports(p)"
    try:
        found = module.supports(p)
    except (Exception, SystemExit) as err:
        raise IdeaError(f"{at} raised {where(err, path)}") from err
    if not (isinstance(found, tuple) and [type(x) for x in found] == [bool, str]):
        raise IdeaError(f"{at} returned {' '.join(repr(found).split())[:100]}; expected (True, '') or (False, reason)")
    return found


def lint(idea_id: str) -> list[str]:
    """House rules that do not stop an experiment but do stop a promotion: docstring headings and length."""
    return rules.lint(_source(folder(idea_id)))


def front_matter(folder: Path) -> dict[str, str]:
    """The `key: value` lines between the two `---` of IDEA.md; empty when there is none."""
    match = re.match(r"---\n(.*?)\n---\n", document(folder), re.DOTALL)
    pairs = (line.partition(":") for line in (match[1] if match else "").splitlines())
    return {
        key.strip(): value.partition(" #")[0].strip().strip("\"'") for key, sep, value in pairs if sep and key.strip()
    }


def document(folder: Path) -> str:
    """The text of IDEA.md; empty when there is none. A byte that is no UTF-8 is shown as such, not an error."""
    try:
        return (folder / "IDEA.md").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
