"""The result of one check of `forge doctor`."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

State = Literal["fine", "warning", "wrong", "skipped"]


@dataclass(frozen=True)
class Finding:
    """One answer.

    Attributes:
        name: what was looked at.
        state: `wrong`: training will not work, or lose something; `warning`: it may be slow or surprise.
        found: what there is.
        why: why that matters; empty where all is fine.
        remedy: how to mend it.
    """

    name: str
    state: State
    found: str
    why: str = ""
    remedy: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return asdict(self)

    def lines(self) -> list[str]:
        """For people."""
        sign = {"fine": "ok", "warning": "warning", "wrong": "WRONG", "skipped": "skipped"}[self.state]
        more = [f"    {' ' * 24}{text}" for text in (self.why, self.remedy) if text]
        return [f"{sign:<8}{self.name:<20}{self.found}", *more]


def fine(name: str, found: str) -> Finding:
    """All is well."""
    return Finding(name, "fine", found)


def skipped(name: str, reason: str) -> Finding:
    """It could not be looked at."""
    return Finding(name, "skipped", reason)
