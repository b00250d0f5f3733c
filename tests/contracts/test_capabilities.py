"""The table of what works together in docs/parallel.md is that of the layouts whose parity is tested."""

import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType

from forge_parallel import MeshConfig

ROOT = Path(__file__).parents[2]
AXES = ("dp_shard", "dp_replicate", "tp", "cp", "pp")


@cache
def parity_tests() -> ModuleType:
    """The parity tests."""
    path = ROOT / "tests" / "distributed" / "test_parity.py"
    spec = importlib.util.spec_from_file_location("parity", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def layouts() -> dict[str, dict[str, int]]:
    """The axes above 1 of every layout of the parity tests."""
    found = {}
    for name, (ranks, sizes) in parity_tests().LAYOUTS.items():
        whole = MeshConfig(**sizes).sizes(ranks)
        found[name] = {axis: size for axis, size in whole.items() if size > 1}
    return found


def table() -> str:
    """A row and a column for each axis: the smallest layout that has both."""
    known = layouts()
    lines = [f"| | {' | '.join(f'`{axis}`' for axis in AXES)} |", f"|---|{'---|' * len(AXES)}"]
    for row in AXES:
        cells = []
        for column in AXES:
            both = [name for name, axes in known.items() if {row, column} <= axes.keys()]
            cells.append(min(both, key=lambda name: len(known[name]), default="-"))
        lines.append(f"| `{row}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def features() -> str:
    """A row for each feature, a column for each axis: a layout in which both are tested together."""
    known = layouts()
    lines = [f"| | {' | '.join(f'`{axis}`' for axis in AXES)} |", f"|---|{'---|' * len(AXES)}"]
    for feature in parity_tests().FEATURES:
        cells = []
        for axis in AXES:
            both = [name for name in parity_tests().COMBINED if axis in known[name]]
            fine = [name for name in both if (feature, name) not in parity_tests().REFUSED]
            cells.append(min(fine, key=lambda name: len(known[name]), default="refused"))
        lines.append(f"| `{feature}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def test_table_in_the_docs_is_that_of_the_parity_tests():
    docs = (ROOT / "docs" / "parallel.md").read_text()
    assert table() in docs, f"expected:\n{table()}"
    assert features() in docs, f"expected:\n{features()}"


def test_every_pair_of_axes_is_tested():
    assert "| - " not in table()
