"""Make the notebooks of the site from `sources/*.py`: cells, what they print, and their pictures.

    uv run python docs/notebooks/make.py [NAME ...]

A source is a Python file, so that it is linted and read like any other:

    # %% [markdown]       the comment below is the text of the cell
    # %%                  code; a line `# !forge ...` becomes `!forge ...`, a command of the shell
    # %% alt: A loss.     code that draws; what the picture shows, for those who do not see it

The site is built from the stored outputs and runs nothing. Run this when a source, or what it shows, has
changed.
"""

import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
SOURCES = FOLDER / "sources"
INSTALL = """\
# On Colab, or wherever they are missing, this installs the packages; elsewhere they are there.
import os
from importlib.util import find_spec

if find_spec("forge_trainer") is None or find_spec("matplotlib") is None:
    %pip install --quiet forge-trainer "forge-interp[pictures,recordings]"
%matplotlib inline
for name in ("FORCE_COLOR", "CLICOLOR_FORCE"):  # of Jupyter: a cell is no terminal
    os.environ.pop(name, None)"""
_CELL = re.compile(r"^# %%(?P<markdown> \[markdown\])?(?: alt: (?P<alt>.*))?\n", re.MULTILINE)


def notebook(source: str) -> nbformat.NotebookNode:
    """The cells of a source, not run; the first is its title, the second installs what is missing."""
    pieces = _CELL.split(source)[1:]
    cells = [_cell(*pieces[start : start + 3]) for start in range(0, len(pieces), 3)]
    cells.insert(1, nbformat.v4.new_code_cell(INSTALL))
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    language = {"name": "python", "pygments_lexer": "ipython3"}
    return nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel, "language_info": language})


def _cell(markdown: str | None, alt: str | None, text: str) -> nbformat.NotebookNode:
    if markdown:
        return nbformat.v4.new_markdown_cell(re.sub(r"^# ?", "", text.strip(), flags=re.MULTILINE))
    cell = nbformat.v4.new_code_cell(re.sub(r"^# (?=!)", "", text.strip(), flags=re.MULTILINE))
    if alt:
        cell.metadata["mystnb"] = {"image": {"alt": alt}}
    return cell


def run(book: nbformat.NotebookNode, timeout_s: float = 300) -> float:
    """Execute all cells in an empty folder, the command `forge` being that of this Python; returns seconds.

    Raises:
        CellExecutionError: a cell fails.
    """
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    os.environ |= {"NO_COLOR": "1", "TERM": "dumb", "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        resources: Any = {"metadata": {"path": folder}}
        NotebookClient(
            book, timeout=timeout_s, resources=resources, record_timing=False, coalesce_streams=True
        ).execute()
    return time.monotonic() - started


def main(names: list[str]) -> None:
    """Make the notebooks of these names, or all."""
    for source in sorted(SOURCES.glob("*.py")):
        if names and source.stem not in names:
            continue
        book = notebook(source.read_text())
        seconds = run(book)
        book.metadata = notebook(source.read_text()).metadata  # not those of the version that ran it
        nbformat.write(book, FOLDER / f"{source.stem}.ipynb")
        sys.stderr.write(f"{source.stem}: {seconds:.0f} s\n")


if __name__ == "__main__":
    main(sys.argv[1:])
