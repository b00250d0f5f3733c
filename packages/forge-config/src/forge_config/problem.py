"""Collects all problems of a configuration, each with its place."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from forge_config.keys import inside, parent
from forge_config.struct import ConfigError

_WORD = re.compile(r"[A-Za-z_][\w-]*(?:\.[\w-]+|\[\d+\])*")


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
    """Collects problems; finds the place of a key from where it or its nearest table was set.

    Args:
        origins: where each key was set.
        file: that was read.
        hints: what keys of other tools are called here, by dotted key or by name.
    """

    def __init__(self, origins: Mapping[str, str], file: str, hints: Mapping[str, str] | None = None) -> None:
        self.origins = origins
        self._hints = hints or {}
        self._file = file
        self._found: list[Problem] = []

    def place(self, key: str) -> str:
        """Where a key was set, or something in it, or the nearest table around it, or the file."""
        within = next((at for known, at in self.origins.items() if inside(known, key)), None)
        if within is not None and key not in self.origins:
            return within
        while key:
            if key in self.origins:
                return self.origins[key]
            key = parent(key)
        return self._file

    def add(self, key: str, text: str, place: str | None = None) -> None:
        """Note one problem."""
        self._found.append(Problem(place or self.place(key), key, text))

    def add_unknown(self, key: str, known: Iterable[str]) -> None:
        """Note a key that does not exist: with what a hint says of it, or the nearest that does."""
        name = key.rpartition(".")[2]
        hint = self._hints.get(key) or self._hints.get(name)
        self.add(key, f"unknown key {name!r}; {f'here it is {hint}' if hint else nearest(name, known)}")

    def add_sentence(self, key: str, text: str, names: Iterable[str] = ()) -> None:
        """Note what a check over several keys says, with the places of the given keys that it names.

        Args:
            key: the section that the check is about; empty for one over several sections.
            text: the sentence.
            names: keys of that section which the sentence may name without the section.
        """
        short = {name: f"{key}.{name}" if key else name for name in names}
        mentions = dict.fromkeys(short.get(word.split(".")[0], word) for word in _words(text, short))
        known = {name: self.origins[name] for name in mentions if name in self.origins}
        place = next(iter(known.values()), None)
        if len(known) > 1:
            text += f" ({', '.join(f'{name} from {at}' for name, at in known.items())})"
        self.add(key, text, place)

    def __len__(self) -> int:
        return len(self._found)

    def raise_if_any(self) -> None:
        """Report everything at once.

        Raises:
            ConfigError: there is at least one problem.
        """
        if self._found:
            count = "1 problem" if len(self._found) == 1 else f"{len(self._found)} problems"
            listed = "\n".join(f"  {problem}" for problem in self._found)
            raise ConfigError(f"{self._file}: {count}\n{listed}")


def _words(text: str, short: Mapping[str, str]) -> list[str]:
    """The words of a sentence that can be keys: names of the section, or anything dotted."""
    return [word for word in _WORD.findall(text) if "." in word or word in short]


def nearest(given: str, known: Iterable[str]) -> str:
    """The hint behind a name that does not exist: the nearest one that does, or all of them."""
    names = sorted(known)
    lower = {name.lower().replace("-", "_"): name for name in names}
    near = difflib.get_close_matches(given.lower().replace("-", "_"), lower, n=1, cutoff=0.72)
    return f"did you mean {lower[near[0]]!r}?" if near else f"known: {', '.join(names) or 'none'}"


def unknown(what: str, given: str, known: Iterable[str]) -> str:
    """The sentence for a name that does not exist."""
    return f"unknown {what} {given!r}; {nearest(given, known)}"
