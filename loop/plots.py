"""The notebooks' plots: error per output against its limit, time against baseline and floor, the stages' budgets.

Each is a `Picture`: SVG with a text alternative, drawn without pyplot so that it needs no window and no backend.
"""

import base64
import html
import io
from collections.abc import Sequence

from matplotlib.figure import Figure

from loop import contract, rows

OURS, THEIRS, SOFT, LIMIT = "#2458c5", "#c46a1b", "#9aa3af", "#b3261e"


class Picture:
    """An SVG image and the sentence that says what it shows."""

    def __init__(self, figure: Figure, alt: str):
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None})
        self.svg, self.alt = buffer.getvalue(), alt

    def __repr__(self) -> str:
        return f"[{self.alt}]"

    def _repr_html_(self) -> str:
        data = base64.b64encode(self.svg.encode()).decode()
        alt = html.escape(self.alt, quote=True)
        image = f"<img alt='{alt}' src='data:image/svg+xml;base64,{data}' style='background:#fff'>"
        return f"<figure style='margin:0 0 1rem'>{image}</figure>"


def errors(check: rows.Check, title: str) -> Picture:
    """Relative RMS error of every output as a share of its limit, the baseline's beside it, on a log axis."""
    names = [name for name, e in check.errors.items() if e.error is not None and e.limit]
    figure = Figure(figsize=(8, 0.8 + 0.34 * max(len(names), 1)))
    axes = figure.subplots()
    for y, name in enumerate(names):
        e = check.errors[name]
        axes.barh(y, max(e.error / e.limit, 1e-4), height=0.38, color=OURS, label="this arm" if y == 0 else None)
        if e.baseline_error:
            axes.barh(y + 0.4, e.baseline_error / e.limit, height=0.3, color=SOFT, label="fla" if y == 0 else None)
    axes.axvline(1.0, color=LIMIT, linewidth=1.5)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel="error as a share of its limit (red line)", title=title)
    axes.set_xlim(left=min(0.1, axes.get_xlim()[0]))
    if names:
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8)
    worst = max(names, key=lambda n: check.errors[n].error / check.errors[n].limit, default="none")
    return Picture(figure, f"{title}. Outputs: {', '.join(names) or 'none'}; closest to its limit: {worst}.")


def times(found: Sequence[rows.Row], title: str) -> Picture:
    """Median time of every arm of a run, the baseline first, with the spread of its blocks and the floor as a line."""
    bars = {row.baseline: row.perf.baseline_block_ms for row in found if row.perf}
    bars |= {row.arm: row.perf.block_ms for row in found if row.perf}
    floor = next((row.perf.floor_ms for row in found if row.perf and row.perf.floor_ms), None)
    figure = Figure(figsize=(8, 1.0 + 0.4 * max(len(bars), 1)))
    axes = figure.subplots()
    for y, (name, samples) in enumerate(bars.items()):
        middle = sorted(samples)[len(samples) // 2]
        axes.barh(y, middle, height=0.6, color=SOFT if name == "000" else OURS)
        axes.plot([min(samples), max(samples)], [y, y], color="black", linewidth=1)
        axes.text(max(samples), y, f" {middle:.3f} ms", va="center", fontsize=8)
    if floor:
        axes.axvline(floor, color=LIMIT, linewidth=1.5, label=f"floor {floor:.3f} ms")
        axes.legend(loc="lower right", fontsize=8)
    axes.set_yticks(range(len(bars)), bars)
    axes.invert_yaxis()
    axes.set(xlabel="ms per call, median of blocks; the line spans all blocks", title=title)
    axes.margins(x=0.15)
    said = "; ".join(f"{name} {sorted(samples)[len(samples) // 2]:.3f} ms" for name, samples in bars.items())
    return Picture(figure, f"{title}. {said}" + (f"; floor {floor:.3f} ms." if floor else "."))


def stages(family: str, p, spans: Sequence[str], title: str) -> Picture:
    """Floor of every stage run by itself (its tensors once through memory, its products), the idea's span in colour."""
    table = contract.cost_table(family, p)
    mine = {name for span in spans for name in contract.parse_span(family, span)}
    figure = Figure(figsize=(8, 0.8 + 0.26 * len(table)))
    axes = figure.subplots()
    axes.barh(
        range(len(table)),
        [1e3 * row["floor_ms"] for row in table],
        color=[OURS if r["stage"] in mine else SOFT for r in table],
    )
    axes.set_yticks(range(len(table)), [row["stage"] for row in table], fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel="floor of the stage by itself, µs on an H200", title=title)
    top = max(table, key=lambda row: row["floor_ms"])
    whole = ", ".join(spans) or "no stage"
    return Picture(
        figure, f"{title}. This idea replaces {whole}. Largest floor: {top['stage']}, {1e3 * top['floor_ms']:.3g} µs."
    )


def kernels(tables: dict[str, dict[str, tuple[float, int]]], title: str, most: int = 12) -> Picture:
    """The slowest kernels of each arm, ms per call, one panel an arm on one scale."""
    figure = Figure(figsize=(9, 1.2 + 0.3 * sum(min(len(t), most) + 2 for t in tables.values())))
    panels = figure.subplots(len(tables), 1, sharex=True, squeeze=False)[:, 0]
    said = []
    for axes, (arm, found) in zip(panels, tables.items(), strict=True):
        shown = list(found.items())[:most]
        axes.barh(range(len(shown)), [ms for _, (ms, _) in shown], color=SOFT if arm == "000" else OURS)
        axes.set_yticks(range(len(shown)), [f"{name[:48]} ×{count}" for name, (_, count) in shown], fontsize=7)
        axes.invert_yaxis()
        total = sum(ms for ms, _ in found.values())
        axes.set_title(f"{arm}: {total:.3f} ms in {len(found)} kernels", fontsize=9, loc="left")
        slowest = f", the slowest {shown[0][0][:60]}" if shown else ""
        said.append(f"{arm} {total:.3f} ms{slowest}")
    panels[-1].set_xlabel("ms per call")
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    return Picture(figure, f"{title}: {'; '.join(said)}")


def stacked(plot: dict) -> Picture:
    """Stacked bars of a stage budget, as `loop.budget.plots` lays it out: chains above, floors below."""
    figure = Figure(figsize=(9, 0.9 + 0.5 * len(plot["bars"])))
    axes = figure.subplots()
    for y, bar in enumerate(plot["bars"]):
        left = 0.0
        for number, part in enumerate(bar["parts"]):
            axes.barh(y, part["ms"], left=left, height=0.6, color=OURS if number % 2 else SOFT)
            if part["width"] > 9:  # percent: what has room for its name
                axes.text(left + part["ms"] / 2, y, part["name"].split(" by ")[0], ha="center", va="center", fontsize=7)
            left += part["ms"]
        axes.text(left, y, f" {bar['ms']:.3g} ms", va="center", fontsize=8)
    axes.set_yticks(range(len(plot["bars"])), [bar["label"] for bar in plot["bars"]], fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set(xlabel="ms", title=plot["title"])
    return Picture(figure, plot["alt"])


def against_floor(entries: Sequence[dict], title: str = "Time against the floor") -> Picture:
    """One point per leaderboard entry: its floor across, its time up, both in ms on log axes."""
    figure = Figure(figsize=(7, 5))
    axes = figure.subplots()
    for arm in dict.fromkeys(e["arm"] for e in entries):
        mine = [e for e in entries if e["arm"] == arm]
        axes.plot([e["floor_ms"] for e in mine], [e["ms"] for e in mine], "o", label=arm)
    if entries:
        ends = [min(e["floor_ms"] for e in entries), max(e["floor_ms"] for e in entries)]
        axes.plot(ends, ends, color=LIMIT, linewidth=1, label="the floor")
        axes.set(xscale="log", yscale="log")
        axes.legend(fontsize=8)
    axes.set(xlabel="floor, ms", ylabel="time, ms", title=title)
    closest = max(entries, key=lambda e: e["floor_ms"] / e["ms"], default=None)
    said = (
        f"closest to its floor: {closest['arm']} on {closest['case']}, {closest['mode']}" if closest else "no times yet"
    )
    return Picture(figure, f"{title}: {len(entries)} times; {said}.")


def error_curves(found: dict[float, dict[str, float]], budgets: dict[str, float], title: str) -> Picture:
    """Relative RMS error of every output over a swept quantity, its budget as a dashed line of the same colour."""
    figure = Figure(figsize=(8, 5))
    axes = figure.subplots()
    for number, name in enumerate(budgets):
        color = f"C{number % 10}"
        axes.plot(list(found), [found[x][name] for x in found], "o-", color=color, label=name)
        axes.axhline(budgets[name], color=color, linestyle=":", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="gate strength", ylabel="relative RMS error", title=title)
    axes.legend(fontsize=8, ncols=2)
    shares = {(x, name): found[x][name] / budgets[name] for x in found for name in budgets if budgets[name]}
    x, name = max(shares, key=shares.get)
    return Picture(
        figure, f"{title}. Closest to its budget: {name} at strength {x:g}, {100 * shares[x, name]:.0f} % of it."
    )
