"""No block of any page is out of sight: it is run, its command or its keys are known, or a reason is listed.

Blocks are found by a parser of Markdown: one that is indented, in a list or behind another fence counts too.
"""

import contextlib
import io
import re
import shlex
import tomllib
from functools import cache
from pathlib import Path
from typing import NamedTuple

import forge_ckpt.cli
import forge_config.cli
import forge_data.cli
import forge_trainer.cli
import pytest
from forge_config import ConfigError
from forge_trainer.config.job import load_job
from pages import ROOT, blocks

markdown = pytest.importorskip("markdown_it").MarkdownIt("commonmark")

MADE = ("docs/reference/", "docs/interp/reference.md", "docs/configuration_reference.md", "docs/_build")
"""Pages that the build writes from the source."""
PAGES = sorted(
    path
    for pattern in (
        "*.md",
        "docs/**/*.md",
        "packages/*/*.md",
        "apps/*/*.md",
        "skills/**/*.md",
        "benchmarks/**/*.md",
    )
    for path in ROOT.glob(pattern)
    if not str(path.relative_to(ROOT)).startswith(MADE)
)
PLAYED = [*sorted((ROOT / "docs" / "howto").glob("*.md")), ROOT / "docs" / "migrate.md"]
MAINS = {
    "forge": forge_trainer.cli.main,
    "forge-config": forge_config.cli.main,
    "forge-data": forge_data.cli.main,
    "forge-ckpt": forge_ckpt.cli.main,
}
RUN_BY = {
    "docs/data.md": "packages/forge-data/tests/test_docs.py",
    "docs/losses.md": "packages/forge-model/tests/test_loss.py",
    "docs/optimizers.md": "apps/trainer/tests/test_optimizers.py",
    "docs/plugs.md": "tests/e2e/test_plugs.py",
    "docs/runs.md": "tests/e2e/test_interp.py",
    "docs/howto/": "tests/docs/test_howto.py",
    "docs/migrate.md": "tests/docs/test_howto.py",
    "docs/interp/": "tests/contracts/test_interp_docs.py",
    "packages/forge-parallel/README.md": "packages/forge-parallel/tests/test_readme.py",
    "packages/": "tests/contracts/test_readme.py",
}
"""The test that runs the Python of a page, by the beginning of its name."""
PROGRAMS = r"(uv|pip|python|torchrun|export|cp|cat|grep|sinfo|sacctmgr|forge(-\w+)?) "
OTHER_TOML = {
    "docs/mup.md", "docs/study.md",  # studies, which their own test runs
    "docs/interp/autoencoders.md",  # of `forge sae`, which its own test runs
    "docs/plan.md",  # a table of devices, which test_plan.py reads
    "packages/forge-config/README.md",  # of structs that the page makes
}  # fmt: skip


class Found(NamedTuple):
    """A block, as Markdown sees it.

    Attributes:
        page: its file, relative to the repository.
        kind: the word behind the fence; empty if there is none.
        text: what is in it.
        line: of the page, from 1.
    """

    page: str
    kind: str
    text: str
    line: int


def found_in(page: Path) -> list[Found]:
    tokens = [one for one in markdown.parse(page.read_text()) if one.type in ("fence", "code_block")]
    name = str(page.relative_to(ROOT))
    return [Found(name, one.info.partition(" ")[0], one.content, one.map[0] + 1) for one in tokens]


EVERY = [block for page in PAGES for block in found_in(page)]


def commands(block: Found) -> list[str]:
    """What a reader types of a block that may have commands."""
    if block.kind not in ("console", "bash", "text", ""):
        return []
    lines = block.text.replace("\\\n", " ").splitlines()
    if block.kind == "console":
        return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    if block.text.startswith("# ") and block.kind == "text":
        return []  # a file
    return [line for line in lines if re.match(PROGRAMS, line)]


def inline() -> list[tuple[str, str]]:
    """Commands of ours in running text, with their pages."""
    ours = re.compile(r"(uv run )?forge(-config|-data|-ckpt)? [a-z]")
    parts = [(page, one) for page in PAGES for one in markdown.parse(page.read_text())]
    spans = [(page, part) for page, one in parts for part in one.children or [] if part.type == "code_inline"]
    return [(str(page.relative_to(ROOT)), span.content) for page, span in spans if ours.match(span.content)]


def test_there_are_many_blocks_of_known_kinds_and_none_hides_in_a_directive():
    assert len(EVERY) > 300
    known = {"console", "bash", "toml", "python", "text", "", "{toctree}", "{mermaid}", "{image}"}
    assert [block for block in EVERY if block.kind not in known] == []
    assert [block for block in EVERY if block.kind == "{image}" and "\n$ " in block.text] == []


@pytest.mark.parametrize("page", PLAYED, ids=lambda page: page.stem)
def test_page_that_is_played_has_no_block_that_the_player_does_not_see(page):
    seen = {(block.kind, block.line) for block in blocks(page)}
    assert [one for one in found_in(page) if (one.kind, one.line) not in seen] == []
    for block in blocks(page):
        if block.kind == "console" and block.reason is None:
            assert block.text.startswith("$ "), f"{page.name}:{block.line} has lines before its first command"


def test_python_of_every_page_is_run_by_a_test():
    for block in EVERY:
        if block.kind != "python":
            continue
        test = next((RUN_BY[start] for start in RUN_BY if block.page.startswith(start)), None)
        assert test is not None, f"nobody runs {block.page}:{block.line}"
        text = (ROOT / test).read_text()
        assert Path(block.page).name in text or "*.md" in text or "README.md" in text, test


@cache
def help_of(program: str, command: str) -> str:
    """What a command says of itself; empty if it does not exist."""
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(io.StringIO()):
        try:
            MAINS[program]([command, "--help"])
        except SystemExit as end:
            return said.getvalue() if end.code == 0 else ""
    return said.getvalue()


def fault(line: str) -> str:
    """What is wrong with a command of ours; empty if nothing is, or if it is none of ours."""
    line = re.split(r" (?:\|\|?|>|2>|&|;) ?|; ?|  +#", line)[0].replace("uv run ", "")
    if "-m forge_trainer " in line:
        line = "forge " + line.partition("-m forge_trainer ")[2]
    words = shlex.split(line)
    if words[0] == "python":
        script = next((ROOT / word for word in words[1:] if word.startswith("benchmarks/")), None)
        return "" if script is None or script.exists() else f"{script} does not exist"
    if words[0] not in MAINS or len(words) < 2:
        return ""
    known = help_of(words[0], words[1])
    if not known:
        return f"{words[0]} has no command {words[1]}"
    flags = [word.partition("=")[0] for word in words[2:] if word.startswith("--")]
    wrong = [flag for flag in flags if "." not in flag and flag != "--imports" and flag not in known]
    return f"{', '.join(wrong)} is no flag of {words[1]}" if wrong else ""


def test_command_of_every_page_is_one_of_the_command_line():
    typed = [(f"{block.page}:{block.line}", line) for block in EVERY for line in commands(block)]
    typed += inline()
    assert len(typed) > 400
    assert {place: said for place, line in typed if (said := fault(line))} == {}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("uv run forge drain x.toml", "has no command drain"),
        ("forge eval RUN --taks a || echo", "--taks is no flag of eval"),
        ("torchrun --nproc-per-node=2 -m forge_trainer evil RUN", "has no command evil"),
        ("uv run forge eval RUN --model.dim=3", ""),
    ],
)
def test_wrong_command_of_a_page_is_found(line, said):
    assert said in fault(line) and bool(said) == bool(fault(line))


BASES = [
    f"{ROOT}/configs/runs/{name}.toml" for name in ("debug", "moe_debug", "vlm_debug_joint", "mixture_debug")
]


def wrong_keys(text: str, folder: Path) -> str:
    """Why no job has the keys of a block; empty if one does, whatever their values are worth there."""
    try:
        given = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        return str(error)
    said = ""
    for base in [None, *BASES] if "extends" not in given else [None]:
        path = folder / "block.toml"
        path.write_text((f'extends = ["{base}"]\n' if base else "") + text)
        try:
            load_job(path, on_paper=True)
        except ConfigError as error:
            said = "; ".join(line for line in str(error).splitlines() if "unknown" in line)
        else:
            said = ""
        if not said:
            return ""
    return said


def test_keys_of_every_toml_block_are_those_of_a_job(tmp_path):
    wrong, looked = {}, 0
    for block in EVERY:
        is_toml = block.kind == "toml" or (block.kind == "" and re.match(r"\[\[?\w", block.text))
        if not is_toml or block.page in OTHER_TOML or "my_lab" in block.text or (ROOT / block.page) in PLAYED:
            continue
        looked += 1
        if said := wrong_keys(block.text, tmp_path):
            wrong[f"{block.page}:{block.line}"] = said
    assert looked > 35 and wrong == {}


def test_wrong_key_of_a_block_is_found(tmp_path):
    assert "unknown key 'stepz'" in wrong_keys("[train]\nstepz = 3\n", tmp_path)
    assert "unknown optimizer type" in wrong_keys('[optimizer]\ntype = "x"\n', tmp_path)


def is_run(block: Found, line: str) -> bool:
    """Whether test_readme.py or test_skills.py runs a command of a README or a skill."""
    if block.page == "README.md":
        return line.startswith("uv run ") and "pytest" not in line
    return (
        block.page.startswith("skills/")
        and block.kind == "bash"
        and not re.search("pytest|lint-imports", line)
    )


def test_command_of_readmes_and_skills_is_run_or_listed_with_the_reason():
    strict = [block for block in EVERY if re.match(r"README|packages/|apps/|skills/", block.page)]
    left = [
        f"{block.page} | {line}" for block in strict for line in commands(block) if not is_run(block, line)
    ]
    listed = [
        line for line in (Path(__file__).parent / "not_run.txt").read_text().splitlines() if " | " in line
    ]
    assert [line.rpartition(" | ")[0] for line in listed] == list(dict.fromkeys(left))
    assert all(len(line.rpartition(" | ")[2]) > 8 for line in listed)
