"""How exact an arm is: its outputs and the baseline's, over the seeds of a check, against the fp64 oracle.

Small cases are compared whole. Of a large one the oracle does a few heads (or blocks of channels), drawn anew for every
seed; the other heads are held against the baseline, which computes them all.
"""

import contextlib
import time

import torch

from . import compare, contract, inputs, oracle, peers, registry
from .cases import Case
from .verdict import Rejected, Status

HEADS = 2  # blocks of channels that the oracle does of a large case, and groups of heads at least
ORACLE = 1 << 19  # (tokens x value heads) that it does: dA_log has one number a head, and few show little
TOKEN_HEADS = 1 << 21  # (tokens x value heads) that the baseline does at a time: as many as the largest production case
PEER_SLACK = 10.0  # budgets allowed to a peer, and to the baseline


def slack_of(arm) -> float:
    """How many budgets an arm's errors may be. A peer is there to be outrun and never ships, and so is the baseline
    (fla's convolution passes nothing on to the oldest input that a final state holds: dx at nine budgets, where
    sequences are packed): they are held to what shows that they compute the same thing, and their errors are recorded.
    """
    return PEER_SLACK if arm.name in (registry.BASELINE, *peers.names(arm.family)) else 1.0


def groups_of(case: Case) -> int:
    """How many groups of heads, or blocks of channels, the oracle does of a large case."""
    return HEADS if case.family == "cconv" else max(HEADS, oracle.groups_within(case, ORACLE))


class Measured:
    """Collects differences seed by seed; `errors()` is the verdict on all of them. `baseline` names an arm, or None;
    `slack` is how many budgets are allowed (see `compare.judge`)."""

    def __init__(self, case: Case, names: tuple[str, ...], baseline: str | None, grad: bool, slack: float = 1.0):
        self.case, self.names, self.baseline, self.grad, self.slack = case, names, baseline, grad, slack
        self.p = case.problem()
        self.ours = {n: [] for n in names}
        self.theirs = {n: [] for n in names}
        self.part, self.seeds, self.seconds = None, 0, {"the baseline": 0.0, "the oracle": 0.0}

    def add(self, values: inputs.Inputs, outputs: dict) -> None:
        """Measure one seed's outputs. Rejected when heads that the oracle did not do are far from the baseline's."""
        outputs = {n: outputs[n] for n in self.names}
        with self._clock("the baseline"):
            theirs = self.baseline_outputs(values) if self.baseline else None
        self.seeds += 1
        if "tiny" not in self.case.tags:
            self.part = oracle.choose(self.case, groups_of(self.case), values.seed)
            values = oracle.take(values, self.part)
        with self._clock("the oracle"):
            truth = oracle.oracle(values)
            terms = oracle.term_sizes(values, truth)
        for sink, found in ((self.ours, outputs), (self.theirs, theirs)):
            if found is None:
                continue
            cut = found if self.part is None else oracle.take_tensors(self.case, found, self.part)
            for name in self.names:
                if cut[name] is not None:
                    sink[name].append(compare.difference(cut[name], truth[name], terms.get(name)))
        if theirs is not None and self.part is not None:
            self._check_other_heads(outputs, theirs)

    @contextlib.contextmanager
    def _clock(self, what: str):
        """Count what is done to the seconds that `what` takes of a check."""
        wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
        wait()
        began = time.perf_counter()
        yield
        wait()
        self.seconds[what] += time.perf_counter() - began

    def baseline_outputs(self, values: inputs.Inputs) -> dict:
        """Of a KDA case beyond the production shapes a few heads at a time: a GPU has no room for fla's of them all."""
        from . import arms

        case, op = self.case, arms.make(self.case.family, self.baseline).op
        parts = oracle.head_parts(case, TOKEN_HEADS) if case.family == "kda" else []
        if len(parts) < 2:
            return inputs.run(op, values, self.grad)
        pieces = [inputs.run(op, oracle.take(values, part), self.grad) for part in parts]
        return oracle.put_together(case, pieces)

    def _check_other_heads(self, outputs: dict, theirs: dict) -> None:
        """Two that err so much each are no farther apart than both together; doubled for the scatter between heads."""
        for name, got in outputs.items():
            if got is None or not torch.isfinite(theirs[name]).all():
                continue
            apart = compare.difference(got, theirs[name])
            fla = self.theirs[name][-1].rel_rms
            budget = self.slack * contract.budget(self.case.family, name, self.p)
            if apart.rel_rms > 2 * (max(budget, fla) + fla):
                text = f"{name} is {apart.rel_rms:.2e} from {self.baseline} over all heads"
                raise Rejected(Status.WRONG_VALUE, f"{text}, worst at {list(apart.worst)}")

    def errors(self) -> dict[str, compare.OutputError]:
        """The verdict on every output. Rejected, with the worst named first, when one is beyond its limit."""
        found = {
            name: compare.judge(self.case.family, name, self.p, ours, self.theirs[name] or None, self.slack)
            for name, ours in self.ours.items()
            if ours
        }
        wrong = sorted((e for e in found.values() if not e.ok), key=lambda e: -e.rel_rms / max(e.limit, 1e-30))
        if wrong:
            raise Rejected(Status.WRONG_VALUE, "; ".join(map(str, wrong[:3])), found)
        return found

    def without_gradients(self, values: inputs.Inputs, outputs: dict) -> str:
        """What there is to say of a forward that has other bits when no gradient is asked for. Rejected when a result
        is then beyond its limit."""
        alone = Measured(self.case, tuple(outputs), self.baseline, grad=False, slack=self.slack)
        alone.add(values, outputs)
        try:
            found = alone.errors()
        except Rejected as no:
            raise Rejected(no.status, f"without gradients: {no.message}", no.errors) from None
        return "other bits, within their limits: " + ", ".join(f"{n} {e.rel_rms:.2e}" for n, e in found.items())

    def proofs(self, errors: dict) -> dict[str, str]:
        of = f", {self.slack:g} times the budgets," if self.slack > 1 else ""
        shown = {"values": f"{len(errors)} outputs within their limits{of} over {self.seeds} seeds"}
        shown["seconds"] = ", ".join(f"{what} {s:.1f}" for what, s in self.seconds.items())
        if self.part is not None:
            whole = self.case.HV if self.case.family == "kda" else self.case.D
            shown["heads"] = f"{len(self.part.heads)} of {whole} at random"
        return shown
