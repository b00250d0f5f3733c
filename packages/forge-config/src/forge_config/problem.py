"""What is wrong with a configuration: all of it, each with its place."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from forge_config.struct import ConfigError


@dataclass(frozen=True)
class Problem:
    """One mistake.

    Attributes:
        place: `file:line`, or the flag that set the key.
        key: dotted key; empty for the file as a whole.
        text: what was given, what was expected, what to do.
    """

    place: str
    key: str
    text: str

    def __str__(self) -> str:
        return f"{self.place}: {self.key}: {self.text}" if self.key else f"{self.place}: {self.text}"


class Problems:
    """Collects problems; finds the place of a key from where it or its nearest table was set."""

    def __init__(self, origins: dict[str, str], file: str) -> None:
        self._origins = origins
        self._file = file
        self._found: list[Problem] = []

    def place(self, key: str) -> str:
        """Where a key was set, or the nearest table around it, or the file."""
        while key:
            if key in self._origins:
                return self._origins[key]
            key = re.sub(r"(\.?[^.\[]+|\[\d+\])$", "", key)
        return self._file

    def add(self, key: str, text: str, place: str | None = None) -> None:
        """Note one problem."""
        self._found.append(Problem(place or self.place(key), key, text))

    def __len__(self) -> int:
        return len(self._found)

    def raise_if_any(self) -> None:
        """Report everything at once.

        Raises:
            ConfigError: there is at least one problem.
        """
        if self._found:
            count = "1 problem" if len(self._found) == 1 else f"{len(self._found)} problems"
            raise ConfigError(
                f"{self._file}: {count}\n" + "\n".join(f"  {problem}" for problem in self._found)
            )


def unknown(what: str, given: str, known: Iterable[str]) -> str:
    """The sentence for a name that does not exist: the nearest one that does, or all of them."""
    names = sorted(known)
    near = difflib.get_close_matches(given, names, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names) or 'none'}"
    return f"unknown {what} {given!r}; {hint}"
