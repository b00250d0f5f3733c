"""The table of what works together in docs/parallel.md is that of the layouts whose parity is tested."""

import importlib.util
from pathlib import Path

from forge_parallel import MeshConfig

ROOT = Path(__file__).parents[2]
AXES = ("dp_shard", "dp_replicate", "tp", "cp", "pp")


def layouts() -> dict[str, dict[str, int]]:
    """The axes above 1 of every layout of the parity tests."""
    path = ROOT / "tests" / "distributed" / "test_parity.py"
    spec = importlib.util.spec_from_file_location("parity", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = {}
    for name, (ranks, sizes) in module.LAYOUTS.items():
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


def test_table_in_the_docs_is_that_of_the_parity_tests():
    assert table() in (ROOT / "docs" / "parallel.md").read_text(), f"expected:\n{table()}"


def test_every_pair_of_axes_is_tested():
    assert "| - " not in table()
