"""Finds copies that land on a tensor-core operand while it is still being read, in a kernel's compiled form.

A wgmma returns before it has read its operands from shared memory. Triton's pipeliner (3.6, 3.7) gives a load that
feeds one a spare buffer, so that the next asynchronous copy goes elsewhere, but not a load that is also used in
registers: then the copy for a later step is issued into the very buffer that products of this step may be reading.
Nothing else orders the two, so results differ from run to run, or do so only under another schedule. The cure is a wait
for the products before the copies: subtract a product (`acc -= tl.dot(...)`) instead of accumulating it in place.
"""

import re
from typing import NamedTuple

_ALLOC = re.compile(r"(%\w+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x")
_VIEW = re.compile(r"(%\w+) = ttg\.memdesc_\w+ (%\w+)")
_COPY = re.compile(r"async_copy_global_to_local %\w+, (%\w+)|async_tma_copy_global_to_local %\w+\[[^\]]*\] (%\w+)")
_DOT = re.compile(r"warp_group_dot (%\w+), (%\w+),.*isAsync = true")
_WAIT = re.compile(r"warp_group_dot_wait .*pendings = (\d+)")


class _Event(NamedTuple):
    kind: str  # "copy" into a ring of buffers, "dot" on rings, "wait" for all products but the last few
    rings: tuple[str, ...]
    pending: int = 0


def overwritten(ttgir: str) -> list[str]:
    """Rings of buffers in which a copy may land on an operand in flight, one line each; empty when there is none."""
    lines = ttgir.splitlines()
    buffers, home, events = {}, {}, []
    for line in lines:  # in order: names inside one region are used again in another
        if m := _ALLOC.search(line):
            buffers[m[1]], home[m[1]] = int(m[2]), m[1]
        elif m := _VIEW.search(line):
            home[m[1]] = home.get(m[2])
        events.append(_event(line, home))
    found = {}
    for first, last in _innermost_loops(lines):
        before = [e for e in events[:first] if e]
        body = [e for e in events[first:last] if e]
        for ring in _run(before, body, buffers):
            found[ring] = f"{ring}: a copy into its {buffers[ring]} buffers may land on an operand in flight"
    return list(found.values())


def _event(line: str, home: dict) -> _Event | None:
    if m := _DOT.search(line):
        return _Event("dot", tuple(dict.fromkeys(home[n] for n in m.groups() if home.get(n))))
    if m := _WAIT.search(line):
        return _Event("wait", (), int(m[1]))
    if m := _COPY.search(line):
        return _Event("copy", tuple(home[n] for n in m.groups() if home.get(n)))
    return None


def _innermost_loops(lines: list[str]):
    """First and last line of every loop that holds no other."""
    start = None
    for number, line in enumerate(lines):
        if " scf.for " in line:
            start, indent = number, len(line) - len(line.lstrip())
        elif start is not None and line.startswith(" " * indent + "}"):
            yield start, number
            start = None


def _run(before: list[_Event], body: list[_Event], buffers: dict):
    """Play a few iterations. Iteration i reads buffer i of a ring and copies into buffer i + (copies already made)."""
    ahead = {r: sum(r in e.rings for e in before if e.kind == "copy") for r in buffers}
    flight: list[tuple[tuple[str, ...], int]] = []
    for i in range(4):
        for e in body:
            if e.kind == "wait":
                flight = flight[len(flight) - e.pending :] if e.pending else []
            elif e.kind == "dot":
                flight.append((e.rings, i))
            else:
                for ring in e.rings:
                    if any(ring in rings and (i + ahead[ring] - j) % buffers[ring] == 0 for rings, j in flight):
                        yield ring
