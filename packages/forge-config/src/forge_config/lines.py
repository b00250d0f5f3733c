"""On which line of a TOML document each key stands; tomli gives no positions of keys."""

from __future__ import annotations

import re

import tomli

from forge_config.keys import item, join

_SKIP = re.compile(r"(?:[ \t\r\n,]|#[^\n]*)*")
_KEY = re.compile(r"""(?:[A-Za-z0-9_-]+|"(?:[^"\\\n]|\\.)*"|'[^'\n]*')""")
_SPACE = re.compile(r"[ \t]*")
_SCALAR = re.compile(r"[^,\]}\n#]*")
_STRINGS = (
    re.compile(r"\"\"\"(?:[^\\]|\\.)*?\"\"\"\"{0,2}", re.DOTALL),
    re.compile(r"'''.*?''''{0,2}", re.DOTALL),
    re.compile(r'"(?:[^"\\\n]|\\.)*"'),
    re.compile(r"'[^'\n]*'"),
)


def key_lines(text: str) -> dict[str, int]:
    """The line of each key, table and array item of a valid TOML document, counted from 1."""
    scanner = _Scanner(text)
    scanner.document()
    return scanner.lines


class _Scanner:
    """Walks over a document that tomli has accepted, so it need not detect mistakes."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.lines: dict[str, int] = {}
        self._counted = (0, 1)
        self._sizes: dict[str, int] = {}

    def document(self) -> None:
        table = ""
        self._skip(_SKIP)
        while self.at < len(self.text):
            if self._peek("["):
                table = self._header()
            else:
                self._pair(table)
            self._skip(_SKIP)

    def _header(self) -> str:
        is_array = self._peek("[[")
        self.at += 2 if is_array else 1
        key = ""
        names = self._names()
        for position, name in enumerate(names):
            key = join(key, name)
            self._note(key)
            if is_array and position == len(names) - 1:
                self._sizes[key] = self._sizes.get(key, 0) + 1
            if key in self._sizes:
                key = item(key, self._sizes[key] - 1)
                self._note(key)
        self.at = self.text.index("]", self.at) + (2 if is_array else 1)
        return key

    def _pair(self, table: str) -> None:
        key = table
        for name in self._names():
            key = join(key, name)
            self._note(key)
        self.at = self.text.index("=", self.at) + 1
        self._value(key)

    def _value(self, key: str) -> None:
        self._skip(_SPACE)
        if self._peek("{"):
            self._inline_table(key)
        elif self._peek("["):
            self._array(key)
        elif not any(self._skip(kind) for kind in _STRINGS):
            self._skip(_SCALAR)

    def _inline_table(self, key: str) -> None:
        self.at += 1
        self._skip(_SKIP)
        while not self._peek("}"):
            self._pair(key)
            self._skip(_SKIP)
        self.at += 1

    def _array(self, key: str) -> None:
        self.at += 1
        self._skip(_SKIP)
        index = 0
        while not self._peek("]"):
            self._note(item(key, index))
            self._value(item(key, index))
            self._skip(_SKIP)
            index += 1
        self.at += 1

    def _names(self) -> list[str]:
        names: list[str] = []
        while True:
            self._skip(_SPACE)
            match = _KEY.match(self.text, self.at)
            assert match is not None, self.text[self.at : self.at + 40]
            self.at = match.end()
            names.append(match[0] if match[0][0] not in "\"'" else tomli.loads(f"k = {match[0]}")["k"])
            self._skip(_SPACE)
            if not self._peek("."):
                return names
            self.at += 1

    def _note(self, key: str) -> None:
        """Keys come in the order of the text, so lines are counted from the last one on."""
        if key not in self.lines:
            start, line = self._counted
            self._counted = (self.at, line + self.text.count("\n", start, self.at))
            self.lines[key] = self._counted[1]

    def _peek(self, text: str) -> bool:
        return self.text.startswith(text, self.at)

    def _skip(self, pattern: re.Pattern[str]) -> bool:
        match = pattern.match(self.text, self.at)
        if match is not None:
            self.at = match.end()
        return match is not None
