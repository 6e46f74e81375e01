"""What a check says: a closed list of statuses, the evidence, and the token without which nothing is timed.

A token ties the arm's source, the case and this check protocol together, and counts only in the process that issued
it: what is timed is what was checked, built once."""

import hashlib
from dataclasses import dataclass, fields
from enum import StrEnum

from .compare import OutputError

PROTOCOL = "check-v5"  # changes when a check proves something else than before
_issued: set[str] = set()


class Status(StrEnum):
    PASSED = "PASSED"
    WRONG_VALUE = "WRONG_VALUE"  # an output, or a tensor of a span, is farther from fp64 than its limit
    NON_FINITE = "NON_FINITE"  # NaN or Inf that the arm computed
    UNWRITTEN = "UNWRITTEN"  # a result depends on memory that nobody wrote
    OUT_OF_BOUNDS = "OUT_OF_BOUNDS"  # wrote past a buffer, or a result depends on what lies there
    INPUT_MODIFIED = "INPUT_MODIFIED"  # an input changed
    NONDETERMINISTIC = "NONDETERMINISTIC"  # equal inputs gave different bits
    REUSED_RESULT = "REUSED_RESULT"  # an earlier call's result came back, or was overwritten by a later call
    WRONG_STREAM = "WRONG_STREAM"  # work that does not wait for the caller's stream
    WRONG_DTYPE = "WRONG_DTYPE"  # what a step returns, or an output: its dtype, shape, device or presence is wrong
    UNSUPPORTED = "UNSUPPORTED"  # the arm says no, with its reason
    ERROR = "ERROR"  # the arm raised


class Rejected(Exception):
    """The check found a reason to reject; carries the status, and the errors where they were measured."""

    def __init__(self, status: Status, message: str, errors: dict | None = None):
        super().__init__(message)
        self.status, self.message, self.errors = status, message, errors or {}


class CheckError(ValueError):
    """A check was asked for, or relied on, wrongly; one line."""


@dataclass(frozen=True)
class CheckResult:
    """One arm on one case. `message` says in one line why it was rejected; `detail` has the traceback of an ERROR.

    errors: output -> OutputError, as far as the check came. proofs: what was shown, e.g. {"poison": "23 buffers"}.
    seeds: the fresh seeds it ran with, enough to repeat it. token: None unless PASSED."""

    family: str
    arm: str
    case: str
    status: Status
    message: str
    seeds: tuple[int, ...]
    errors: dict[str, OutputError]
    proofs: dict[str, str]
    device: str
    source_sha: str
    seconds: float
    grad: bool = True
    detail: str = ""
    token: str | None = None
    protocol: str = PROTOCOL

    @property
    def ok(self) -> bool:
        return self.status is Status.PASSED

    @property
    def findings(self) -> tuple[str, ...]:
        """What speaks against the arm; empty when it passed."""
        return () if self.ok else (f"{self.status}: {self.message}",)

    def to_dict(self) -> dict:
        """Plain types only, for a row or a table. The token stays behind: it means nothing elsewhere."""
        found = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("token", "detail")}
        errors = {name: error.to_dict() for name, error in self.errors.items()}
        return found | {
            "status": str(self.status),
            "seeds": list(self.seeds),
            "errors": errors,
            "proofs": dict(self.proofs),
        }

    def __str__(self) -> str:
        tail = "" if self.ok else f": {self.message}"
        return f"{self.arm} on {self.family}/{self.case}: {self.status}{tail}"


def _token(arm, case, device: str, grad: bool, source_sha: str) -> str:
    parts = (
        PROTOCOL,
        arm.family,
        arm.name,
        source_sha,
        getattr(arm, "chain_sha", None),
        case.sha,
        device.partition(":")[0],
        grad,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def issue(arm, case, device: str, grad: bool) -> str:
    """The token of a check that passed just now."""
    token = _token(arm, case, device, grad, arm.source_sha)
    _issued.add(token)
    return token


def require(token: str | None, arm, case, device: str, grad: bool = True) -> None:
    """CheckError, in one line, unless `token` was issued in this process for this arm as it is now, on this case and
    device."""
    if token is None or token not in _issued:
        raise CheckError(f"arm {arm.name} on {case.id} has no passed check in this process: check it before timing it")
    current = arm.current_sha() if hasattr(arm, "current_sha") else arm.source_sha
    if current != arm.source_sha:
        raise CheckError(f"arm {arm.name} changed since it was checked: make and check it again")
    # a check with gradients covers a forward alone
    if token not in (_token(arm, case, device, g, current) for g in ({True} if grad else {True, False})):
        raise CheckError(f"the token is of another check than {arm.name} on {case.id} ({device}, gradients {grad})")
