"""The notebooks are those of their sources, show what they ran, and run."""

import base64
import importlib.util
import re
import resource
import struct

import pytest
from pages import ROOT

nbformat = pytest.importorskip("nbformat")

FOLDER = ROOT / "docs" / "notebooks"

NAMES = sorted(path.stem for path in (FOLDER / "sources").glob("*.py"))
SECONDS = {
    "attention": 43, "checkpoints": 39, "inspection": 58, "optimizers": 97, "recordings": 30,
    "routing": 34, "scaling": 10, "two_runs": 43, "vision": 64, "vision_recordings": 36,
}  # fmt: skip
"""CPU that each may take, a quarter above what a busy machine took; CI gives all of them eight minutes."""


def script():
    spec = importlib.util.spec_from_file_location("make_notebooks", FOLDER / "make.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make = script()


def stored(name: str):
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def test_every_source_has_a_notebook_in_the_table_of_contents():
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == NAMES
    listed = re.findall(r"^notebooks/(\w+)$", (ROOT / "docs" / "index.md").read_text(), re.MULTILINE)
    assert sorted(listed) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_notebook_has_the_cells_of_its_source(name):
    book, made = stored(name), make.notebook((FOLDER / "sources" / f"{name}.py").read_text())
    nbformat.validate(book)
    remedy = f"the source has changed: uv run python docs/notebooks/make.py {name}"
    assert [(c.cell_type, c.source) for c in book.cells] == [(c.cell_type, c.source) for c in made.cells], (
        remedy
    )
    assert [c.metadata.get("mystnb") for c in book.cells] == [c.metadata.get("mystnb") for c in made.cells]
    assert "**You need:**" in book.cells[0].source


@pytest.mark.parametrize("name", NAMES)
def test_notebook_holds_what_it_ran_and_no_error(name):
    code = [cell for cell in stored(name).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    for cell in code:
        for output in cell.outputs:
            assert output.output_type != "error", output
            text = output.get("text", "")
            assert not [sign for sign in ("Traceback", "Warning", "\x1b") if sign in text]


@pytest.mark.parametrize("name", NAMES)
def test_pictures_of_a_notebook_have_an_alt_text_and_something_on_them(name):
    drawn = 0
    for cell in stored(name).cells:
        images = [
            one.data["image/png"] for one in cell.get("outputs", []) if "image/png" in one.get("data", {})
        ]
        assert bool(images) == ("mystnb" in cell.metadata), cell.source
        for image in images:
            png = base64.b64decode(image)
            width, height = struct.unpack(">II", png[16:24])
            assert width <= 1600 and height <= 1600 and len(png) > 5000
        drawn += len(images)
    assert drawn >= 2


def test_notebooks_take_clearly_less_than_eight_minutes_together():
    assert sorted(SECONDS) == NAMES and sum(SECONDS.values()) < 460


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", NAMES)
def test_notebook_runs_within_its_seconds(name):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    make.run(make.notebook((FOLDER / "sources" / f"{name}.py").read_text()), timeout_s=1000)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"{name}: {spent:.0f} s of CPU")
    assert 1 < spent < SECONDS[name]
