"""What a batch runs: ideas, and for a tier the cases of each."""

from collections.abc import Sequence
from dataclasses import dataclass

from loop import apart, arms, cases, registry

SUPPORTS_SECONDS = 30.0  # for what one idea says to all the cases of a tier
TIERS = ("smoke", "primary", "full")


@dataclass(frozen=True)
class Job:
    """One run of one idea's notebook. `case` is empty where the notebook chooses."""

    idea: registry.Idea
    case: str = ""

    @property
    def name(self) -> str:
        return f"{self.idea.name} {self.case}".rstrip()

    def run_id(self, batch: str) -> str:
        return "-".join(filter(None, (batch, self.idea.id, self.case)))


def select(only: Sequence[str], family: str | None) -> list[registry.Idea]:
    """The ideas of a batch, in order. ValueError in one line for an unknown idea or family, or none left."""
    if family is not None and family not in registry.FAMILIES:
        raise ValueError(f"family {family!r} is unknown; known: {', '.join(registry.FAMILIES)}")
    ideas = [i for i in registry.all_ideas(only) if family is None or i.family is None or family in i.family]
    if not ideas:
        raise ValueError(f"no idea of family {family}" if family else "no ideas yet; ./ladder new makes one")
    return ideas


def require_tier(tier: str | None) -> None:
    """ValueError in one line for an unknown tier."""
    if tier is not None and tier not in TIERS:
        raise ValueError(f"tier {tier!r} is unknown; known: {', '.join(TIERS)}")


def of(ideas: Sequence[registry.Idea], tier: str | None) -> list[Job]:
    """One job an idea, or with a tier one for each of its cases that this machine and the idea take.

    An idea that takes none, or does not import, is still one job: its notebook says why.
    """
    if tier is None:
        return [Job(idea) for idea in ideas]
    require_tier(tier)
    return [job for idea in ideas for job in _of_tier(idea, tier)]


def _of_tier(idea: registry.Idea, tier: str) -> list[Job]:
    if idea.error:
        return [Job(idea)]
    # 000 is of every family; its notebook takes the first
    family = idea.family if idea.family in registry.FAMILIES else registry.FAMILIES[0]
    listed = list(cases.select(family, tier, "gpu" if arms.on_gpu() else "tiny"))
    return [Job(idea, case) for case in _taken(idea, listed)] or [Job(idea)]


def _taken(idea: registry.Idea, listed: Sequence) -> list[str]:
    """The cases that the idea takes. None when its supports(p) fails, however it fails: its notebook says so."""
    if idea.id == registry.BASELINE:
        return [case.id for case in listed]
    module = registry.load(idea.id)
    problems = [(case.id, case.problem(arms.arch())) for case in listed]
    try:
        return apart.apart(lambda: [case for case, p in problems if registry.supports(module, p)[0]], SUPPORTS_SECONDS)
    except apart.Lost:
        return []
