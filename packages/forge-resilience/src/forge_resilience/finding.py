"""What is wrong, in words for a person and as hosts for a program. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """A fault of some ranks.

    Attributes:
        why: the fault in words.
        hosts: the hosts to blame, without their domain; empty where nobody is blamed.
    """

    why: str
    hosts: tuple[str, ...] = ()


def short_names(hosts: list[str]) -> tuple[str, ...]:
    """Names of hosts without their domain, each once, in order."""
    return tuple(dict.fromkeys(host.partition(".")[0] for host in hosts))
