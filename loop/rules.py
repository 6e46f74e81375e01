"""The rules that a kernel's text must keep, read without running it."""

import ast
import re
import sys
from pathlib import Path

ALLOWED_IMPORTS = ("torch", "triton", "cutlass", "fla", "kernel_fun._common")
PROMOTED = re.compile(r"kernel_fun\.\w+\.stages\.(k\d{3}_\w+)")  # a kernel may launch what a promoted one already holds
HEADINGS = ("Parent", "Delta", "Why it should be faster", "Constraints")
DOCSTRING_LINES = 25


class IdeaError(ValueError):
    """An idea that is not there, does not import, or breaks a rule. The message is one line."""


def check_source(source: bytes, path: Path) -> None:
    """The rules a kernel's text must keep: what it imports, no autotuner, no postponed annotations."""
    where = f"ideas/{path.parent.name}/kernel.py"
    try:
        source.decode("utf-8")
    except UnicodeDecodeError as err:
        line = source.count(b"\n", 0, err.start) + 1
        raise IdeaError(f"ideas/{path.parent.name} does not import: kernel.py:{line}: not UTF-8") from None
    try:
        tree = ast.parse(source, filename=str(path))
    except (SyntaxError, ValueError) as err:
        line = f":{err.lineno}" if isinstance(err, SyntaxError) else ""
        raise IdeaError(
            f"ideas/{path.parent.name} does not import: kernel.py{line}: SyntaxError: {getattr(err, 'msg', err)}"
        ) from err
    for node in ast.walk(tree):
        for name in _imported(node):
            if name == "__future__":
                raise IdeaError(
                    f"{where}:{node.lineno}: no __future__ import in a kernel file (it breaks CuTe's annotations)"
                )
            if not _allowed(name):
                accepted = f"{', '.join(ALLOWED_IMPORTS)}, kernel_fun.kda.stages.k005_... and the standard library"
                raise IdeaError(f"{where}:{node.lineno}: imports {name}; a kernel may import {accepted}")
        if isinstance(node, ast.Attribute) and node.attr == "autotune":
            raise IdeaError(f"{where}:{node.lineno}: autotuner; tuned values are literals")


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        if node.level:
            return ["." * node.level + (node.module or "")]
        if node.module == "kernel_fun":
            return [f"kernel_fun.{alias.name}" for alias in node.names]
        return [node.module or ""]
    return []


def _allowed(name: str) -> bool:
    if any(name == ok or name.startswith(ok + ".") for ok in ALLOWED_IMPORTS) or PROMOTED.fullmatch(name):
        return True
    return name.partition(".")[0] in sys.stdlib_module_names


def builds_on(source: bytes) -> list[str]:
    """The promoted kernels that a kernel's text imports, by module name."""
    names = [name for node in ast.walk(ast.parse(source)) for name in _imported(node)]
    return sorted({found[1] for name in names if (found := PROMOTED.fullmatch(name))})


def lint(source: bytes) -> list[str]:
    """House rules that do not stop an experiment but do stop a promotion: docstring headings and length."""
    text = ast.get_docstring(ast.parse(source)) or ""
    found = [
        f"kernel.py's docstring has no heading {h!r}" for h in HEADINGS if not re.search(rf"^{h}\b", text, re.MULTILINE)
    ]
    if len(text.splitlines()) > DOCSTRING_LINES:
        found.append(f"kernel.py's docstring has {len(text.splitlines())} lines; {DOCSTRING_LINES} at most")
    return found
