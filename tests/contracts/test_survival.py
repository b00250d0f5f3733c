"""docs/survival.md tells of every exit code, and names only tests that there are."""

import re
from pathlib import Path

import pytest
from forge_resilience.exit_codes import ExitCode

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "survival.md").read_text()


@pytest.mark.parametrize("code", ExitCode, ids=lambda code: code.name)
def test_exit_code_has_a_section_and_a_row(code):
    heading = f"### {code.value}: {code.name.lower().replace('_', ' ')}\n"
    assert heading in PAGE and len(PAGE.partition(heading)[2].partition("###")[0].strip()) > 40
    assert f"| {code.value} | {code.name.lower()} |" in (ROOT / "docs" / "runs.md").read_text()


def test_tests_that_are_named_are_there():
    named = set(re.findall(r"test_\w+\.py", PAGE))
    there = {
        path.name for folder in ("tests", "apps", "packages") for path in (ROOT / folder).rglob("test_*.py")
    }
    assert named and named <= there
