"""A plan: which function runs each stage of a family's chain, in order, and which tensors live how long.

A family's chain is a list of named stages (`fwd.norm`, ..., `bwd.beta`) with the tensors each reads and writes. A
`Step` is one function that stands for one stage or for several consecutive ones (its span). `make_plan` covers the
chain with steps, prefers earlier candidates, and derives from the names alone what the forward must save for the
backward and when a tensor can be dropped.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

META = frozenset({"p", "cu_seqlens", "chunk_indices", "chunk_offsets"})  # arguments that are not tensors of the chain
WANTED = "wanted"  # an optional argument: which of its tensors a function is asked for (see `_tell_wanted`)


@dataclass(frozen=True)
class Stage:
    """A named stage of a chain and its contract: the tensors it reads and writes, by name."""

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]


@dataclass(frozen=True)
class Step:
    """One function standing for consecutive stages. `reads` are the function's own keyword names."""

    span: tuple[str, ...]
    fn: Callable
    reads: tuple[str, ...]
    meta: tuple[str, ...]
    writes: tuple[str, ...]
    source: str

    def __call__(self, env: dict, meta: dict) -> dict:
        given = {name: env[name] for name in self.reads}
        for name in self.meta:
            given[name] = meta[name]
        return self.fn(**given)


@dataclass(frozen=True)
class Plan:
    """Steps of both passes. `saved`: what the forward keeps for the backward; `drops[i]`: what is dead after step i."""

    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    saved: tuple[str, ...]
    forward_drops: tuple[tuple[str, ...], ...]
    backward_drops: tuple[tuple[str, ...], ...]

    def run_forward(self, env: dict, meta: dict) -> dict:
        return _run(self.forward, self.forward_drops, env, meta)

    def run_backward(self, env: dict, meta: dict) -> dict:
        return _run(self.backward, self.backward_drops, env, meta)

    def sources(self) -> tuple[str, ...]:
        return tuple(step.source for step in self.forward + self.backward)


def _run(steps, drops, env, meta):
    for step, dead in zip(steps, drops, strict=True):
        env.update(step(env, meta))
        for name in dead:
            env.pop(name, None)
    return env


def parse_span(text: str, stages: Sequence[Stage]) -> tuple[str, ...]:
    """`"bwd.intra"` or `"bwd.intra..bwd.cumsum"` (inclusive) -> the stage names. ValueError names what is accepted."""
    names = [stage.name for stage in stages]
    first, _, last = text.partition("..")
    for name in (first, last or first):
        if name not in names:
            raise ValueError(f"span {text!r}: no stage {name!r}; stages are {', '.join(names)}")
    lo, hi = names.index(first), names.index(last or first)
    if hi < lo:
        raise ValueError(f"span {text!r}: {last!r} comes before {first!r}")
    if first.split(".")[0] != names[hi].split(".")[0]:
        raise ValueError(f"span {text!r} crosses from one pass to the other; give one span per pass")
    return tuple(names[lo : hi + 1])


def span_reads(span: Sequence[str], stages: Sequence[Stage]) -> tuple[str, ...]:
    """Tensors the span takes from outside: read before any of its stages has written them."""
    written, reads = set(), []
    for stage in stages:
        if stage.name in span:
            reads += [n for n in stage.reads if n not in written and n not in reads]
            written.update(stage.writes)
    return tuple(reads)


def span_writes(span: Sequence[str], stages: Sequence[Stage], outputs: Iterable[str]) -> tuple[str, ...]:
    """Tensors of the span that are wanted outside: by a later stage (before it is written again), or the caller."""
    names = [stage.name for stage in stages]
    after = stages[names.index(span[-1]) + 1 :]
    writes = []
    for stage in stages:
        if stage.name in span:
            writes += [n for n in stage.writes if n not in writes]
    wanted = []
    for name in writes:
        for stage in after:
            if name in stage.reads:
                wanted.append(name)
                break
            if name in stage.writes:
                break
        else:
            if name in outputs:
                wanted.append(name)
    return tuple(wanted)


def make_step(
    span: str, fn: Callable, stages: Sequence[Stage], outputs: Iterable[str], source: str, writes=None
) -> Step:
    """A step from a function whose keyword-only arguments name the tensors it reads.

    A function may also take `wanted`, which must have a default: see `_tell_wanted`.
    """
    names = parse_span(span, stages)
    keywords = [p.name for p in inspect.signature(fn).parameters.values() if p.kind is p.KEYWORD_ONLY]
    return Step(
        span=names,
        fn=fn,
        reads=tuple(n for n in keywords if n not in META and n != WANTED),
        meta=tuple(n for n in keywords if n in META),
        writes=tuple(writes) if writes is not None else span_writes(names, stages, outputs),
        source=source,
    )


def cover(stages: Sequence[Stage], preferred: Sequence[Step], base: Sequence[Step]) -> list[Step]:
    """Steps for all stages, in order: preferred ones that do not overlap an earlier choice, base steps elsewhere."""
    taken: dict[str, Step] = {}
    for step in preferred:
        if not any(name in taken for name in step.span):
            taken.update(dict.fromkeys(step.span, step))
    names = [stage.name for stage in stages]
    chosen, i = [], 0
    while i < len(names):
        step = taken.get(names[i])
        if step is None:
            free = [s for s in base if s.span[0] == names[i] and not any(n in taken for n in s.span)]
            if not free:
                raise LookupError(f"no function for stage {names[i]!r}")
            step = max(free, key=lambda s: len(s.span))
        chosen.append(step)
        i += len(step.span)
    return chosen


def build(
    steps: Sequence[Step],
    inputs: Iterable[str],
    fwd_outputs: Iterable[str],
    bwd_inputs: Iterable[str],
    bwd_outputs: Iterable[str],
) -> Plan:
    """Order, lifetimes and residuals of a covered chain. LookupError when a step reads what nothing provides."""
    forward = tuple(s for s in steps if s.span[0].startswith("fwd"))
    backward = tuple(s for s in steps if s.span[0].startswith("bwd"))
    backward = _prune(backward, set(bwd_outputs))
    produced = set(inputs).union(*(s.writes for s in forward)) if forward else set(inputs)
    saved, have = [], set(bwd_inputs)
    for step in backward:
        for name in step.reads:
            if name not in have and name not in saved:
                if name not in produced:
                    raise LookupError(f"{step.source} reads {name!r}, which neither the inputs nor the forward provide")
                saved.append(name)
        have.update(step.writes)
    forward = _prune(forward, set(fwd_outputs) | set(saved))
    have = set(inputs)
    for step in forward:
        missing = [n for n in step.reads if n not in have]
        if missing:
            raise LookupError(f"{step.source} reads {missing[0]!r} before anything provides it")
        have.update(step.writes)
    keep_fwd, keep_bwd = set(fwd_outputs) | set(saved), set(bwd_outputs)
    forward, backward = _tell_wanted(forward, keep_fwd), _tell_wanted(backward, keep_bwd)
    return Plan(forward, backward, tuple(saved), _drops(forward, keep_fwd), _drops(backward, keep_bwd))


def _prune(steps, wanted):
    """Leave out steps whose outputs nobody wants (the recompute of w and u, once no kernel reads them)."""
    kept = []
    for step in reversed(steps):
        if wanted.intersection(step.writes):
            wanted = (wanted - set(step.writes)) | set(step.reads)
            kept.append(step)
    return tuple(reversed(kept))


def _tell_wanted(steps, keep):
    """Bind `wanted` for the functions that ask: the names of theirs that a later step or the caller reads, so that they
    can leave the others out."""
    told = []
    for i, step in enumerate(steps):
        if WANTED in inspect.signature(step.fn).parameters:
            wanted = frozenset(step.writes) & set(keep).union(*(s.reads for s in steps[i + 1 :]))
            step = replace(step, fn=functools.partial(step.fn, wanted=wanted))
        told.append(step)
    return tuple(told)


def _drops(steps, keep):
    """Per step, the names that no later step reads: popped, so that their memory is free for what follows."""
    drops = []
    for i, step in enumerate(steps):
        later = set(keep).union(*(s.reads for s in steps[i + 1 :])) if i + 1 < len(steps) else set(keep)
        drops.append(tuple(n for n in (*step.reads, *step.writes) if n not in later))
    return tuple(drops)
