"""`./ladder new`: a folder with a prediction to fill in, a notebook, and a kernel module that already passes its check.

The starting kernel is the span's stages in plain torch, cut out of the family's reference: correct, unfused, slow. The
engineer replaces it piece by piece and re-runs the notebook. The folder appears whole or not at all.
"""

import ast
import importlib
import inspect
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jinja2

from kernel_fun._common.plan import META, parse_span, span_reads, span_writes
from loop import notebooks, registry

FAMILIES = registry.FAMILIES
_BUILTIN = frozenset(dir(__builtins__) if inspect.ismodule(__builtins__) else __builtins__)


def new(number: str, slug: str, *, family: str, spans: Sequence[str], parent: str | None = None) -> Path:
    """Write `ideas/NNN-slug/` and return it. ValueError, in one line and with nothing written, for bad input.

    Args:
        number: 1 to 999, not used by an existing idea; written with three digits.
        slug: lower-case words joined by hyphens.
        family: `kda` or `cconv`.
        spans: stages that the idea replaces, `first` or `first..last`; at most one per pass.
        parent: the idea that this one is a delta against; of the same family.
    """
    ideas = registry.root() / "ideas"
    number = _number(number)
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", slug or "") or len(slug) > 40:
        raise ValueError(f"slug {slug!r}: lower-case words joined by hyphens, 40 characters at most, e.g. fuse-gate")
    if family not in FAMILIES:
        raise ValueError(f"family {family!r}: one of {', '.join(FAMILIES)}")
    chain = importlib.import_module(f"kernel_fun.{family}.chain")
    names = _spans(spans, chain)
    parent = _parent(parent, family)

    target = ideas / f"{number}-{slug}"
    ideas.mkdir(exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=".new-", dir=ideas))
    try:
        facts = {"number": number, "slug": slug, "family": family, "spans": list(spans), "parent": parent}
        (part / "kernel.py").write_text(kernel_source(facts, names, chain), encoding="utf-8")
        (part / "IDEA.md").write_text(_render("IDEA.md.j2", facts | _contract(names, chain)), encoding="utf-8")
        notebooks.write(part / "bench.ipynb", idea=number)
        part.chmod(0o755)
        os.rename(part, target)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return target


# ------------------------------------------------------------ validation
def _number(text: str) -> str:
    if not re.fullmatch(r"\d{1,3}", text or "") or int(text) == 0:
        raise ValueError(f"number {text!r}: 1 to 999 (000 is the baseline)")
    number, used = text.zfill(3), registry.folders()
    if number in used:
        raise ValueError(
            f"number {number} is taken by {used[number].name}; the next free one is {int(max(used)) + 1:03d}"
        )
    return number


def _spans(spans, chain):
    if not spans:
        raise ValueError(f"span: at least one of {', '.join(s.name for s in chain.STAGES)}")
    names = {text: parse_span(text, chain.STAGES) for text in spans}
    passes = [stages[0].partition(".")[0] for stages in names.values()]
    if len(set(passes)) != len(spans):
        raise ValueError(f"span {spans[-1]!r}: one span per pass; join neighbouring stages as first..last")
    return names


def _parent(parent: str | None, family: str) -> str:
    """The parent's number; 000, fla itself, when none is given. A parent whose kernel is broken may still be one."""
    idea = registry.glance(parent) if parent else None
    if idea and idea.id != registry.BASELINE and idea.family and idea.family != family:
        raise ValueError(f"parent {idea.name} is of family {idea.family}, not {family}")
    return idea.id if idea else registry.BASELINE


# ------------------------------------------------------------ the starting kernel
def kernel_source(facts: dict, names: dict[str, tuple[str, ...]], chain) -> str:
    """Source of a kernel module whose spans run the reference stages, cut out with all they call."""
    reference = importlib.import_module(f"kernel_fun.{facts['family']}.reference")
    tree = ast.parse(inspect.getsource(reference))
    pieces = _pieces(tree)
    wanted, entries = [], []
    for text, stages in names.items():
        entries.append(_entry(text, stages, names, chain, reference))
        for stage in stages:
            _close(_function_name(stage, reference), pieces, wanted)
            if stage == "bwd.gate":
                _close("no_gate_bwd", pieces, wanted)
    order = {name: i for i, name in enumerate(pieces)}
    lines = inspect.getsource(reference).splitlines()
    body = [_text(pieces[name], lines) for name in sorted(wanted, key=order.get)]
    constants = [b for b, name in zip(body, sorted(wanted, key=order.get), strict=True) if not _is_def(pieces[name])]
    functions = [b for b, name in zip(body, sorted(wanted, key=order.get), strict=True) if _is_def(pieces[name])]
    used = {n.id for name in wanted for n in ast.walk(pieces[name]) if isinstance(n, ast.Name)}
    problem = "KdaProblem" if facts["family"] == "kda" else "ConvProblem"
    imports = _imports(tree, used | {problem})
    if problem not in " ".join(imports):
        imports.append(f"from kernel_fun._common.problem import {problem}")
    return _formatted(
        _render(
            "kernel.py.j2",
            facts
            | {
                "imports": [i for i in imports if "kernel_fun" not in i],
                "own_imports": [i for i in imports if "kernel_fun" in i],
                "constants": constants,
                "functions": functions,
                "entries": entries,
                "problem": problem,
            },
        )
    )


def _formatted(source: str) -> str:
    command = [sys.executable, "-m", "ruff", "format", "--line-length", "120", "--stdin-filename", "kernel.py", "-"]
    return subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout


def _entry(text, stages, names, chain, reference) -> dict:
    """What the template needs to write the function of one span."""
    table = [s for s in chain.STAGES if s.name in stages]
    outputs = span_writes(stages, chain.STAGES, chain.OUTPUTS)
    calls, meta = [], {"p"}
    for stage in table:
        fn = _function_name(stage.name, reference)
        keywords = list(inspect.signature(getattr(reference, fn)).parameters)
        meta.update(META.intersection(keywords))
        calls.append(
            {
                "stage": stage.name,
                "fn": fn,
                "keywords": keywords,
                "writes": stage.writes,
                "identity": "no_gate_bwd" if stage.name == "bwd.gate" else "",
            }
        )
    reads = list(span_reads(stages, chain.STAGES))
    name = "run" if len(names) == 1 else "run_" + stages[0].partition(".")[0]
    return {"span": text, "name": name, "reads": reads, "meta": sorted(meta), "calls": calls, "outputs": outputs}


def _function_name(stage: str, reference) -> str:
    return reference.STAGES[stage].__name__


def _pieces(tree) -> dict[str, ast.stmt]:
    """Top-level functions and constants of a module, by name, in order."""
    found = {}
    for node in tree.body:
        if _is_def(node):
            found[node.name] = node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = node
    return found


def _is_def(node) -> bool:
    return isinstance(node, ast.FunctionDef | ast.ClassDef)


def _close(name, pieces, wanted):
    """Add a piece and everything of the module that it names."""
    if name in wanted:
        return
    wanted.append(name)
    for node in ast.walk(pieces[name]):
        if isinstance(node, ast.Name) and node.id in pieces and node.id not in _BUILTIN:
            _close(node.id, pieces, wanted)


def _text(node, lines) -> str:
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
    return "\n".join(lines[first - 1 : node.end_lineno])


def _imports(tree, used) -> list[str]:
    """The reference's import lines that the cut-out uses, made absolute."""
    kept = []
    for node in tree.body:
        if isinstance(node, ast.Import):
            kept += [
                f"import {a.name}" + (f" as {a.asname}" if a.asname else "")
                for a in node.names
                if (a.asname or a.name.partition(".")[0]) in used
            ]
        elif isinstance(node, ast.ImportFrom) and (names := [a.name for a in node.names if a.name in used]):
            module = node.module or ""
            kept.append(
                f"from {'kernel_fun.' + module if node.level == 2 else module} import {', '.join(sorted(names))}"
            )
    return kept


# ------------------------------------------------------------ documents
def _contract(names, chain) -> dict:
    """What the spans read and write, for IDEA.md."""
    return {
        "contract": [
            {
                "span": text,
                "reads": span_reads(stages, chain.STAGES),
                "writes": span_writes(stages, chain.STAGES, chain.OUTPUTS),
            }
            for text, stages in names.items()
        ]
    }


def _render(template: str, facts: dict) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(template).render(**facts)
