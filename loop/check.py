"""The gate: an arm is timed, recorded and promoted only after this has found nothing against it.

For a case and fresh random seeds, `check` runs the arm forward and backward with everything it allocates poisoned and
every buffer between guard bands (`loop.poison`), and shows, in this order: nothing was written out of bounds, no
input changed, the outputs have the contract's dtypes and shapes and are finite, the same inputs give the same bits
whatever uninitialised memory holds, the forward is as good without gradients, new values in the same buffers give new
results and leave the old ones alone, the work waits for the caller's stream, and each output is as close to the fp64
oracle as its budget and fla's own error ask. On a tiny case it also holds each span of an idea against its stages in
fp64, tensor by tensor: what one stage does wrong can be too little to show in the outputs."""

import secrets
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch

from . import cases, compare, contract, held, inputs, poison, registry, spans
from .compare import same_bits
from .measure import Measured, slack_of
from .verdict import CheckError, CheckResult, Rejected, Status, issue

RUNS = 3  # on a GPU; a CPU runs one program at a time, so two runs say as much
PLAUSIBLE = 0x3F  # a byte that makes finite, ordinary numbers in every format (0.75 in bf16 and fp32)
CANCELS = ("dA_log",)  # a sum that may vanish: the oracle holds the whole op's against the size of its terms
SLEEP_CYCLES = 600_000_000  # about 0.3 s: longer than it takes to launch a call


def fresh_seeds(count: int) -> tuple[int, ...]:
    """Seeds that nothing could have prepared for."""
    return tuple(secrets.randbits(31) for _ in range(count))


def check(arm, case, seeds: int | Sequence[int] = 2, device=None, grad: bool = True, baseline="000") -> CheckResult:
    """Check one arm on one case; never raises for what the arm does.

    seeds: how many fresh seeds (at least 2), or the seeds of an earlier check to repeat it.
    device: default the GPU if there is one. grad: False checks the forward alone.
    baseline: the arm whose error bounds ours on a GPU ("000", fla), or None. CheckError for bad arguments.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    cases.require_device(case, device)
    if arm.family != case.family:
        raise CheckError(f"arm {arm.name} is of family {arm.family}, case {case.id} of {case.family}")
    seeds = fresh_seeds(seeds) if isinstance(seeds, int) else tuple(seeds)
    if len(set(seeds)) < 2:
        raise CheckError(f"seeds={seeds}: at least two different seeds, or a stored result would pass")
    session = _Session(arm, case, seeds, device, grad, baseline)
    status, message, detail, start = Status.PASSED, "", "", time.perf_counter()
    try:
        ok, reason = arm.supports(case)
        if not ok:
            raise Rejected(Status.UNSUPPORTED, reason)
        session.run()
    except Rejected as no:
        status, message = no.status, no.message
        session.errors |= no.errors
    except registry.IdeaError as err:
        status, message = Status.ERROR, str(err)
    except (Exception, SystemExit) as err:
        status, message = Status.ERROR, _raised(arm, err)
        detail = traceback.format_exc()
    return CheckResult(
        family=case.family,
        arm=arm.name,
        case=case.id,
        status=status,
        message=message,
        seeds=seeds,
        errors=session.errors,
        proofs=session.proofs,
        device=str(device),
        source_sha=arm.source_sha,
        seconds=time.perf_counter() - start,
        grad=grad,
        detail=detail,
        token=issue(arm, case, str(device), grad) if status is Status.PASSED else None,
    )


def _raised(arm, err: BaseException) -> str:
    """An exception in one line, with the line of the idea's kernel.py that it passed through."""
    for module in getattr(arm, "modules", ()):
        path = Path(module.__file__)
        said = registry.where(err, path)
        if said.startswith(path.name):
            return f"{held.name(module)}/{said}"
    return registry.where(err, Path())


class _Session:
    """The steps of one check. Each raises Rejected, or notes in `proofs` what it has shown."""

    def __init__(self, arm, case, seeds, device, grad, baseline):
        self.arm, self.case, self.seeds, self.device, self.grad = arm, case, seeds, device, grad
        self.expected = contract.outputs(case.family, case.problem())
        if not grad:
            self.expected = {n: self.expected[n] for n in inputs.RESULTS[case.family]}
        baseline = None if device.type == "cpu" or baseline == arm.name else baseline
        self.values = Measured(case, tuple(self.expected), baseline, grad, slack_of(arm))
        self.errors, self.proofs = {}, {}
        self.op = getattr(arm, "held_op", arm.op)

    def run(self):
        given = self._load(inputs.make(self.case, self.seeds[0], self.device))
        first = self._execute()
        self._check_inputs(given)
        self._check_contract(first)
        self._check_finite(first)
        kept = {n: None if t is None else t.clone() for n, t in first.items()}
        self._check_repeats(kept)
        if self.grad:
            self._check_without_gradients(given, kept)
        self.values.add(given, kept)
        del given  # the largest case leaves no room for what nobody needs
        for seed in self.seeds[1:]:
            values = inputs.make(self.case, seed, self.device)
            self._refill(values)
            again = self._execute()
            self._check_inputs(values)
            self._check_contract(again)
            self._check_not_reused(first, kept, again)
            self._check_finite(again)
            self.values.add(values, again)
            del values, again
        self._check_stream(inputs.make(self.case, self.seeds[0], self.device), kept)
        self.errors |= self.values.errors()
        self.proofs |= self.values.proofs(self.errors)
        self._check_spans()

    # ---------------------------------------------------------------------------------------------------- running it
    def _load(self, values):
        """Put the inputs between guard bands; `values` stays as the untouched copy."""
        self.guards, tensors = [], {}
        for name, t in values.items():
            if t is None:
                tensors[name] = None
                continue
            tensors[name], guard = poison.guarded(t, f"input {name}")
            self.guards.append(guard)
        self.inputs = values.like(tensors)
        return values

    def _refill(self, values):
        """Other values into the same buffers, as a training loop does."""
        for name, t in values.items():
            if t is not None:
                self.inputs[name].copy_(t)

    def _execute(self, body=None, band=None, grad=None) -> dict:
        """One call of the arm, poisoned; raises when it wrote past a buffer of its own or of the inputs."""
        self._sync()  # what an arm does on a stream of its own is `_check_stream`'s to show, not a race here
        with poison.Poison(body=body, band=band) as poisoned:
            outputs = inputs.run(self.op, self.inputs, self.grad if grad is None else grad)
            self._sync()
        trespassed = poisoned.trespassed() + poison.trespassed(self.guards)
        if trespassed:
            raise Rejected(Status.OUT_OF_BOUNDS, f"wrote outside of {', '.join(trespassed[:3])}")
        self.proofs |= {"poison": f"{poisoned.count} buffers", "guards": "intact"}
        return outputs

    def _sync(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    # ------------------------------------------------------------------------------------------------------- judging
    def _check_inputs(self, values):
        changed = [n for n, t in values.items() if t is not None and not same_bits(t, self.inputs[n])]
        if changed:
            raise Rejected(Status.INPUT_MODIFIED, f"input {changed[0]} is not what was passed")
        self.proofs["inputs"] = "unmodified"

    def _check_contract(self, outputs):
        for name, got in outputs.items():
            want = self.expected[name]
            if (got is not None) != want.present:
                raise Rejected(
                    Status.WRONG_DTYPE,
                    f"{name} is {'None' if got is None else 'a tensor'}, the contract says otherwise",
                )
            if got is not None and (got.dtype, tuple(got.shape), got.device.type) != (
                want.dtype,
                want.shape,
                self.device.type,
            ):
                found = f"{got.dtype} {list(got.shape)} on {got.device.type}"
                raise Rejected(
                    Status.WRONG_DTYPE, f"{name} is {found}, the contract says {want.dtype} {list(want.shape)}"
                )
        self.proofs["contract"] = "dtypes, shapes and None as written"

    def _check_finite(self, outputs):
        bad = [n for n, t in outputs.items() if t is not None and not torch.isfinite(t).all()]
        if not bad:
            self.proofs["finite"] = "every output"
            return
        where = compare.difference(outputs[bad[0]], outputs[bad[0]])
        text = f"{bad[0]}{list(where.worst)} is not finite ({where.bad} of {where.numbers} entries)"
        for status, fill, band, why in (
            (Status.UNWRITTEN, PLAUSIBLE, None, "finite once uninitialised memory is"),
            (Status.OUT_OF_BOUNDS, None, PLAUSIBLE, "finite once the memory past the buffers is"),
        ):
            other = self._execute_filled(fill, band)
            if torch.isfinite(other[bad[0]]).all():
                raise Rejected(status, f"{text}; {why}")
        raise Rejected(Status.NON_FINITE, text)

    def _check_spans(self):
        """Each span of an idea by itself; a tiny case alone, where that takes no time to speak of."""
        modules = getattr(self.arm, "modules", ())
        if not modules or "tiny" not in self.case.tags:
            return
        count = 0
        for module in modules:
            found = spans.check_spans(module, self.case, self.seeds[0], self.device, self.grad)
            found = [e for e in found if e.tensor not in CANCELS]
            wrong = sorted((e for e in found if not e.ok), key=lambda e: -e.rel_rms / max(e.budget, 1e-30))
            if wrong:
                said = "; ".join(map(str, wrong[:3]))
                raise Rejected(Status.WRONG_VALUE, f"{held.name(module)}: {said}")
            count += len(found)
        self.proofs["spans"] = f"{count} tensors of the idea's spans within their budgets, against fp64 stages"

    def _execute_filled(self, body, band):
        """Run with other bytes in uninitialised memory and, with `band`, around every buffer."""
        if band is not None:
            poison.refill_bands(self.guards, band)
        try:
            return self._execute(body, band)
        finally:
            if band is not None:
                poison.refill_bands(self.guards, None)

    def _check_repeats(self, kept):
        """The same bits again, also with ordinary numbers where uninitialised memory and guard bands held NaN."""
        runs = 2 if self.device.type == "cpu" else RUNS
        fills = [(None, None)] * (runs - 2) + [(PLAUSIBLE, PLAUSIBLE)]
        for body, band in fills:
            different = self._differs(kept, self._execute_filled(body, band))
            if not different:
                continue
            text = f"{different} differs between two runs on the same inputs"
            if self._differs(kept, self._execute()):
                raise Rejected(Status.NONDETERMINISTIC, text)
            if self._differs(kept, self._execute_filled(PLAUSIBLE, None)):
                raise Rejected(Status.UNWRITTEN, f"{different} depends on what uninitialised memory holds")
            if self._differs(kept, self._execute_filled(None, PLAUSIBLE)):
                raise Rejected(Status.OUT_OF_BOUNDS, f"{different} depends on what lies past a buffer")
            raise Rejected(Status.NONDETERMINISTIC, text)
        self.proofs["repeats"] = f"{runs} runs equal to the bit"

    def _check_without_gradients(self, values, kept):
        """A forward without gradients may run other kernels; it is what `fwd` times."""
        alone = self._execute(grad=False)
        self._check_inputs(values)
        self._check_contract(alone)
        same = not self._differs(alone, kept)
        self.proofs["no_grad"] = "the same bits" if same else self.values.without_gradients(values, alone)

    @staticmethod
    def _differs(a, b) -> str | None:
        return next((n for n in a if not same_bits(a[n], b[n])), None)

    def _check_not_reused(self, first, kept, again):
        """Nothing an arm hands out is handed out again. Empties `first` as soon as a later call has left it alone."""
        own = [n for n in first if n not in contract.SAME_AS_INPUT[self.case.family]]
        overwritten = self._differs({n: first[n] for n in own}, kept)
        if overwritten:
            raise Rejected(Status.REUSED_RESULT, f"{overwritten} of an earlier call was overwritten by a later one")
        result = next(iter(again))
        if same_bits(kept[result], again[result]):
            raise Rejected(Status.REUSED_RESULT, f"{result} is an earlier call's, though the inputs changed")
        first.clear()
        self._load(self.inputs)  # the same values elsewhere
        moved = self._differs(again, self._execute())
        if moved:
            text = f"{moved} changes when equal inputs move: something is kept by address"
            raise Rejected(Status.REUSED_RESULT, text)
        self.proofs["reuse"] = "new values, new results; old results untouched"

    def _check_stream(self, values, kept):
        """Values that arrive late on a side stream must reach the result: work elsewhere would read what was there
        before."""
        if self.device.type != "cuda":
            self.proofs["stream"] = "not shown: no GPU"
            return
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(SLEEP_CYCLES)
            self._refill(values)
            outputs = inputs.run(self.op, self.inputs, self.grad)
            seen = {n: None if t is None else t.clone() for n, t in outputs.items()}
        torch.cuda.synchronize()
        different = self._differs(kept, seen)
        del outputs, seen
        torch.cuda.empty_cache()  # a side stream's memory serves no other
        if different:
            raise Rejected(Status.WRONG_STREAM, f"{different} did not wait for the values on the caller's stream")
        self.proofs["stream"] = "waits for the caller's stream"
