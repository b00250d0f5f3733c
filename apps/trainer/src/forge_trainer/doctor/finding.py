"""The result of one check of `forge doctor`."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

State = Literal["fine", "warning", "wrong", "skipped"]


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        name: name of the check.
        state: `wrong`: training will fail or lose data; `warning`: it may be slow or behave unexpectedly.
        found: the observation.
        why: why it matters; empty if all is fine.
        remedy: how to fix it.
    """

    name: str
    state: State
    found: str
    why: str = ""
    remedy: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the finding for `--json`."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return the lines for a person."""
        sign = {"fine": "ok", "warning": "warning", "wrong": "WRONG", "skipped": "skipped"}[self.state]
        more = [f"    {' ' * 24}{text}" for text in (self.why, self.remedy) if text]
        return [f"{sign:<8}{self.name:<20}{self.found}", *more]


def fine(name: str, found: str) -> Finding:
    """Return the finding of a check without problems."""
    return Finding(name, "fine", found)


def skipped(name: str, reason: str) -> Finding:
    """Return the finding of a check that could not run."""
    return Finding(name, "skipped", reason)
