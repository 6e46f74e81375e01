"""Small tables that read well as HTML in a notebook and as text everywhere else."""

import html
from collections.abc import Sequence


class Table:
    """A title, a header and rows of already formatted cells. A cell equal to one of `bad` stands out in HTML."""

    def __init__(self, title: str, header: Sequence[str], rows: Sequence[Sequence[str]], bad: Sequence[str] = ()):
        self.title, self.header = title, list(header)
        self.rows, self.bad = [[str(cell) for cell in row] for row in rows], set(bad)

    def __repr__(self) -> str:
        lines = [self.header, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.header))]
        text = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
        ]
        return "\n".join([self.title, *text])

    def _repr_html_(self) -> str:
        head = "".join(f"<th scope='col'>{html.escape(cell)}</th>" for cell in self.header)
        body = "".join(f"<tr>{''.join(map(self._cell, row))}</tr>" for row in self.rows)
        caption = f"<caption style='text-align:left'>{html.escape(self.title)}</caption>"
        return f"<div class='scroll'><table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"

    def _cell(self, cell: str) -> str:
        mark = " class='bad' style='font-weight:600'" if cell in self.bad else ""
        return f"<td{mark}>{html.escape(cell)}</td>"


class Stack:
    """Several tables, pictures or lines of text, one above the other."""

    def __init__(self, *parts):
        self.parts = [part for part in parts if part is not None]

    def __repr__(self) -> str:
        return "\n\n".join(map(str, self.parts))

    def _repr_html_(self) -> str:
        return "\n".join(
            part._repr_html_() if hasattr(part, "_repr_html_") else f"<p>{html.escape(str(part))}</p>"
            for part in self.parts
        )


def number(x: float | None, digits: int = 3) -> str:
    """Significant digits, or nothing for None."""
    return "" if x is None else f"{x:.{digits}g}"


def megabytes(x: int | None) -> str:
    return "" if x is None else f"{x / 1e6:,.1f}"
