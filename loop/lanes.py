"""Lanes: the arms of a run on their way through it, what they share, and how what goes wrong with one is kept to it."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from loop import arms


@dataclass
class Lane:
    """One arm on its way through a run. `unit` runs the arm once per input set; `samples` are ms per call, one per
    block.
    """

    arm: arms.Arm
    calls: list[Callable] = field(default_factory=list)
    unit: Callable | None = None
    unit_s: float = 0.0
    host_s: float = 0.0
    caller_ms: float | None = None
    reps: int = 1
    peak_bytes: int | None = None
    saved_bytes: int | None = None
    samples: list[float] = field(default_factory=list)
    mhz: list[int] = field(default_factory=list)
    launches: dict[str, int] = field(default_factory=dict)
    failure: tuple[str, str] | None = None  # (status, reason)


@dataclass
class Run:
    """What a run's arms have in common."""

    loop: bool = False  # a plain loop of eager calls
    timer: str = "cpu"
    timer_note: str = ""
    sets: int = 1
    set_bytes: int = 0
    blocks: int = 0
    aa_samples: list[float] = field(default_factory=list)
    throttle: set[str] = field(default_factory=set)


class ContextLost(RuntimeError):
    """An arm broke the GPU's context. Its row is written; nothing measured after it in this process means a thing."""

    def __init__(self, lane: Lane):
        super().__init__(f"arm {lane.arm.name} broke the GPU's context, so this process stops: {lane.failure[1]}")
        self.lane = lane


def stop_if_lost(lane: Lane) -> None:
    """ContextLost when the lane's failure is one that the whole process does not survive."""
    if lane.failure and "CUDA error" in lane.failure[1]:
        raise ContextLost(lane)


def guarded(lane: Lane, work: Callable[[], None]) -> None:
    """Run a step of one lane; what it raises becomes the lane's failure."""
    try:
        work()
    except torch.OutOfMemoryError as err:
        lane.failure = ("OOM", one_line(err))
    except (Exception, SystemExit) as err:
        lane.failure = ("ERROR", f"{type(err).__name__}: {one_line(err)}")
        stop_if_lost(lane)
    if lane.failure:
        drop(lane)


def drop(lane: Lane) -> None:
    """Let go of the lane's graphs and residuals."""
    lane.calls, lane.unit = [], None
    if arms.on_gpu():
        with contextlib.suppress(RuntimeError):  # after a fault, what stopped the run is what should be read
            torch.cuda.empty_cache()


def one_line(err: BaseException) -> str:
    return " ".join(str(err).split())[:300]
