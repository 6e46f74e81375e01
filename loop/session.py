"""What an idea's notebook calls: one object, one line per cell.

Every cell that runs the kernel makes its arms anew from the source as it is on disk, so that an edit counts without a
restart, and a check of an earlier source is dropped rather than used for a time.
"""

from loop import arms, bench, cases, check, contract, plots, registry, rows, tables
from loop.arms import Arm


class NotPassed(Exception):
    """Raised by the verdict cell when the idea failed; the message is the reason of its row."""


def open_idea(idea: str, *, case: str = "", mode: str = "fwdbwd", seed: int = 0, family: str = "") -> "Session":
    """A session on one idea. ValueError, in one line, for an unknown idea, case, mode or family.

    Args:
        case: of the idea's family; empty: the first it supports, of the `tiny` ones without a GPU, else `primary`.
        family: needed for 000 alone, which serves every family; empty: kda.
    """
    found = registry.find(idea)
    if found.error:
        raise registry.IdeaError(found.error)
    if mode not in contract.MODES:
        raise ValueError(f"mode {mode!r} is unknown; known: {', '.join(contract.MODES)}")
    if found.id == registry.BASELINE:
        family = family or registry.FAMILIES[0]
    elif family not in ("", found.family):
        raise ValueError(f"family={family!r}: idea {found.name} is of family {found.family}")
    family = family if found.id == registry.BASELINE else found.family
    return Session(found, family, case, mode, seed)


class Session:
    """One idea, one case, one mode: contract, check, bench, record, plots, verdict."""

    def __init__(self, idea: registry.Idea, family: str, case: str, mode: str, seed: int):
        self.idea, self.family, self.mode, self.seed = idea, family, mode, seed
        self.case = cases.get(family, case) if case else self._default_case()
        self.checked: check.CheckResult | None = None
        self.rows: list[rows.Row] = []

    def __repr__(self) -> str:
        return (
            f"{self.idea.name} ({self.family}; {', '.join(self.idea.spans) or 'no stage of its own'}): {self.case.id}, "
            f"{self.case.describe()}, {self.mode}, on {inputs_device()}"
        )

    def contract(self) -> tables.Stack:
        """What the span reads and writes, and the floors of its stages and of the whole span, at this case."""
        p = self.case.problem(arms.arch())
        spans = self.idea.spans or (None,)
        parts = []
        for span in spans:
            if span:
                listed = contract.table(self.family, span)
                keys = ("stage", "side", "tensor", "shape", "dtype", "unit", "meaning")
                parts.append(tables.Table(f"{span}: tensors", keys, [[row[k] or "" for k in keys] for row in listed]))
            costs = contract.cost_table(self.family, p, span)
            listed = [_cost(row["stage"], row["bytes"], row["flops"], row["floor_ms"], row["bound"]) for row in costs]
            if span:
                whole = contract.span_floor(self.family, span, p)
                listed.append(_cost("the span in one kernel", whole.bytes, whole.flops, whole.ms, whole.bound))
            header = ("stage", "MB", "Gflop", "floor µs (H200)", "bound")
            parts.append(tables.Table(f"{span or 'the whole chain'}: costs at {self.case.id}", header, listed))
        return tables.Stack(*parts)

    def check(self, seeds: int = 2) -> tables.Stack:
        """Check the kernel as it is on disk now; shows the errors and what was proven, or why it was rejected."""
        self.checked = check.check(self.arm(), self.case, seeds)
        found = self.checked
        header = ("output", "error", "limit", "budget", "fla's error", "")
        listed = [
            (e.name, *map(tables.number, (e.rel_rms, e.limit, e.budget, e.fla_rel_rms)), "ok" if e.ok else "TOO FAR")
            for e in found.errors.values()
        ]
        errors = tables.Table(f"{found}", header, listed, bad=["TOO FAR"]) if listed else str(found)
        proofs = tables.Table("shown", ("what", "how"), list(found.proofs.items())) if found.proofs else None
        return tables.Stack(errors, proofs, found.detail or None)

    def bench(self, blocks: int | None = None) -> tables.Table:
        """Time the idea against 000, and against ship where that supports the case; checks what has not passed."""
        arm = self.arm()
        baselines = ["000"]
        if self.idea.id != registry.BASELINE and arms.make(self.family, "ship").supports(self.case)[0]:
            baselines.append("ship")
        known = {arm.name: self.checked} if self.checked and self._is_current(arm) else {}
        with _Progress() as progress:
            self.rows = bench.bench(
                self.family,
                [arm],
                self.case,
                self.mode,
                checks=known,
                baselines=baselines,
                blocks=blocks,
                seed=self.seed,
                cmd=f"./ladder run {self.idea.id} -p case={self.case.id} -p mode={self.mode} -p seed={self.seed}",
                progress=progress,
            )
        return bench_table(self.rows, f"{self.case.id}, {self.mode}, on {inputs_device()}")

    def record(self) -> str:
        """Append the rows of the last bench to the record; where they went."""
        if not self.rows:
            raise NotPassed("nothing to record: run the bench cell first")
        folder = rows.default_folder(self.family, self.rows[0].device)
        writer = rows.Writer(folder, f"notebook-{self.idea.name}")
        self.rows = [writer.write(row.model_copy(update={"run_id": writer.run_id})) for row in self.rows]
        return f"{len(self.rows)} rows in {writer.path.relative_to(registry.root())}"

    def plots(self) -> tables.Stack:
        """Error per output against its limit; time against baseline, incumbent and floor; the stages' floors."""
        mine = self._mine()
        title = f"{self.idea.name}, {self.case.id}"
        shown = next((row.check for row in mine if row.check and row.check.errors), None)
        return tables.Stack(
            plots.errors(shown, f"{title}: error against limit") if shown else "no errors to show",
            plots.times(self.rows, f"{title}, {self.mode}") if any(r.perf for r in self.rows) else "no times to show",
            plots.stages(
                self.family, self.case.problem(arms.arch()), self.idea.spans, f"{title}: floors of the stages"
            ),
        )

    def verdict(self) -> tables.Table:
        """The verdicts of the last bench. NotPassed when the idea failed or kernel.py changed since."""
        mine = self._mine()
        if not mine:
            raise NotPassed("no verdict: run the bench cell first")
        if failed := next((row for row in mine if row.status != "PASSED"), None):
            raise NotPassed(f"{failed.status}: {failed.reason}")
        if mine[0].code_sha != self.arm().source_sha:
            raise NotPassed("kernel.py changed since the bench: run the check and bench cells again")
        listed = [
            (
                f"against {r.baseline}",
                r.verdict,
                f"{r.perf.ratio:.3f}",
                f"{r.perf.ci_low:.3f} to {r.perf.ci_high:.3f}",
                r.row_id,
            )
            for r in mine
        ]
        return tables.Table(
            f"{self.idea.name}: verdict", ("", "verdict", "ratio", "interval", "row"), listed, bad=["SLOWER"]
        )

    # ------------------------------------------------------------------------------------------------------ inside
    def arm(self) -> Arm:
        """The idea's arm, from its source as it is on disk now."""
        return arms.make(self.family, self.idea.id)

    def _is_current(self, arm: Arm) -> bool:
        return self.checked.source_sha == arm.source_sha

    def _mine(self) -> list[rows.Row]:
        return [row for row in self.rows if row.arm == self.idea.id]

    def _default_case(self):
        """The first case for this machine that the idea supports; the first of all when there is none, to say why."""
        tags = ("gpu", "primary") if arms.on_gpu() else ("tiny", "smoke")
        listed = list(cases.select(self.family, *tags))
        arm = self.arm()
        return next((case for case in listed if arm.supports(case)[0]), listed[0])


def inputs_device() -> str:
    from loop import env

    return "a CPU, where times say nothing about a GPU" if env.device_name() == "cpu" else env.device_name()


def bench_table(found: list[rows.Row], title: str) -> tables.Table:
    """Rows of a bench: times, ratios and verdicts, or the reason of each failure."""
    header = ("arm", "against", "ms", "its ms", "ratio", "interval", "verdict", "share of floor", "peak MB")
    listed = []
    for row in found:
        if perf := row.perf:
            share = "" if perf.floor_share is None else f"{100 * perf.floor_share:.0f} %"
            interval = f"{perf.ci_low:.3f} to {perf.ci_high:.3f}"
            listed.append((row.arm, row.baseline, f"{perf.ms:.3f}", f"{perf.baseline_ms:.3f}", f"{perf.ratio:.3f}",
                           interval,
                           perf.verdict, share, tables.megabytes(perf.peak_bytes)))  # fmt: skip
        else:
            listed.append((row.arm, row.baseline or "", "", "", "", row.reason, row.status, "", ""))
    failures = {row.status for row in found if row.status != "PASSED"}
    return tables.Table(title, header, listed, bad=[*failures, "SLOWER"])


def _cost(name, nbytes, flops, ms, bound):
    return name, f"{nbytes / 1e6:.3g}", f"{flops / 1e9:.3g}", f"{1e3 * ms:.3g}", bound


class _Progress:
    """One line that says what the bench is at, in a notebook; silent elsewhere, and gone at the end."""

    def __enter__(self):
        try:
            from IPython import get_ipython
            from IPython.display import display
        except ImportError:
            self.handle = None
        else:
            self.handle = display({"text/plain": "starting"}, raw=True, display_id=True) if get_ipython() else None
        return self

    def __call__(self, what: str, done: int, total: int) -> None:
        if self.handle:
            self.handle.update({"text/plain": f"{what} {done}/{total}"}, raw=True)

    def __exit__(self, *exc):
        if self.handle:
            self.handle.update({"text/html": "", "text/plain": ""}, raw=True)  # no empty box is left
