"""Plays a page of the documentation as a reader does: block after block, in an empty folder.

    ```console     each line behind `$ ` is typed into bash (`uv run` left out); what stands below must be
                   said. A line of `...` stands for any lines, `...` in a line for any words
    ```toml        whose first line is `# name.toml` becomes a file; so do ```python and ```text
    ```python      without a name is run as a program

A block whose first line is `# not run: reason` is passed over; `not_run.txt` lists them all.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Block(NamedTuple):
    """A fenced part of a page.

    Attributes:
        kind: the word behind the fence.
        text: what is in it.
        line: of the page, from 1.
    """

    kind: str
    text: str
    line: int

    @property
    def reason(self) -> str | None:
        """Why nobody runs it; None if it is run."""
        found = re.match(r"# not run: (.*)", self.text)
        return found.group(1) if found else None

    @property
    def name(self) -> str | None:
        """The file that it becomes."""
        found = re.match(r"# ([\w./-]+\.\w+)\n", self.text)
        return found.group(1) if found else None


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of a page that a reader types or keeps."""
    text = page.read_text()
    for found in re.finditer(r"^```(console|toml|python|text)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield Block(found.group(1), found.group(2), text.count("\n", 0, found.start()) + 1)


def play(page: Path, folder: Path) -> int:
    """Do what a page says in a folder; returns the number of commands and programs that ran.

    Raises:
        AssertionError: one fails, or says something else than the page shows.
    """
    (folder / "configs").symlink_to(ROOT / "configs")
    ran = 0
    for block in blocks(page):
        where = f"{page.name}:{block.line}"
        if block.reason is not None:
            continue
        if block.name is not None:
            (folder / block.name).parent.mkdir(parents=True, exist_ok=True)
            (folder / block.name).write_text(block.text)
        elif block.kind == "python":
            _run([sys.executable, "-c", block.text], folder, where)
            ran += 1
        elif block.kind == "console":
            for command, shown in typed(block.text):
                said = _run(["bash", "-ec", command.replace("uv run ", "")], folder, where)
                assert re.search(pattern(shown), said), (
                    f"{where}: {command}\nshows\n{shown}\nbut says\n{said}"
                )
                ran += 1
    return ran


def typed(text: str) -> list[tuple[str, str]]:
    """Each command of a block, and what it shows below; a line that ends with a backslash goes on."""
    parts = re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]
    found = [re.match(r"((?:.*\\\n)*.*)\n?((?:.*\n?)*)", part) for part in parts]
    return [(one.group(1), one.group(2)) for one in found if one is not None]


def pattern(shown: str) -> str:
    """Matches what a page shows; any number of spaces stands for any other."""
    lines = [r"(?:.*\n)*?" if line == "..." else _line(line) for line in shown.splitlines()]
    return "".join(lines)


def _line(line: str) -> str:
    words = ".*".join(re.escape(part) for part in line.split("..."))
    return re.sub(r"(\\ )+", " +", words) + r" *\n"


def _run(command: list[str], folder: Path, where: str) -> str:
    here = str(Path(sys.executable).parent)
    env = os.environ | {"PATH": f"{here}{os.pathsep}{os.environ['PATH']}", "MPLBACKEND": "agg"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{where}: {command[-1]}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout
