"""The pages of reference say what the source has."""

import re

from pages import ROOT

READ = re.compile(
    r"environ(?:\.get|\.setdefault|\.pop)?[\[(]\s*\"([A-Z_]+)\"|environ\b.*\"([A-Z_]{4,})\"|getenv\(\"([A-Z_]+)\""
)


def test_every_variable_of_the_environment_that_the_source_reads_is_in_the_table():
    page = (ROOT / "docs" / "reference" / "environment.md").read_text()
    sources = [*ROOT.glob("packages/*/src/**/*.py"), *ROOT.glob("apps/*/src/**/*.py")]
    read = {name for path in sources for found in READ.findall(path.read_text()) for name in found if name}
    assert {"FORGE_CACHE", "RANK", "SLURM_JOB_ID"} <= read
    assert sorted(name for name in read if f"`{name}`" not in page and name != "NCCL_") == []
