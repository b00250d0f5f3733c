import json
import sys

import pytest
import tomli
from forge_config.cli import main

MODULE = """
from forge_config import Config

class Section(Config):
    n: int = 1
    m: int = 2

class Job(Config):
    section: Section = Section()

def rises(section):
    if section.n > section.m:
        raise ValueError(f"section.n = {section.n} is above section.m = {section.m}")

checks = [rises]
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs the command in a folder with a struct; returns the exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "cli_struct.py").write_text(MODULE)
    (tmp_path / "a.toml").write_text("section.n = 2")
    (tmp_path / "b.toml").write_text("section.m = 3")
    (tmp_path / "bad.toml").write_text("section.n = 9")

    def done(*argv, struct="cli_struct:Job"):
        code = main([argv[0], "--struct", struct, *argv[1:]])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    yield done
    sys.modules.pop("cli_struct", None)


def test_show_writes_resolved_toml_with_origins(run):
    code, out, _ = run("show", "a.toml", "--section.m=4")
    assert code == 0
    assert out == "[section]\nn = 2  # a.toml:1\nm = 4  # --section.m=4\n"
    assert tomli.loads(out) == {"section": {"n": 2, "m": 4}}


def test_check_accepts_a_good_file(run):
    code, out, err = run("check", "a.toml")
    assert code == 0 and out.startswith("a.toml: good") and not err


def test_check_refuses_with_78_and_the_message_on_stderr(run):
    code, out, err = run("check", "bad.toml", "--section.x=1", "stray")
    assert code == 78 and not out
    assert "3 problems" not in err and "2 problems" in err
    assert "unknown key 'x'" in err and "given 'stray'" in err


def test_check_runs_the_checks_of_the_module(run):
    code, _, err = run("check", "bad.toml")
    assert code == 78 and "section.n = 9 is above section.m = 2" in err


def test_diff_lists_changes_and_exits_with_1(run):
    code, out, _ = run("diff", "a.toml", "b.toml")
    assert code == 1 and out == "section.m: 2 -> 3\nsection.n: 2 -> 1\n"


def test_diff_of_a_file_with_itself_is_empty(run):
    assert run("diff", "a.toml", "a.toml") == (0, "", "")


def test_schema_is_json(run):
    code, out, _ = run("schema")
    assert code == 0 and json.loads(out)["properties"]["section"]["$ref"] == "#/$defs/Section"


@pytest.mark.parametrize(
    "struct", ["no_such_module:Job", "cli_struct:Nope", "cli_struct", "cli_struct:checks"]
)
def test_struct_that_is_none_is_refused(run, struct):
    code, _, err = run("check", "a.toml", struct=struct)
    assert code == 78 and f"--struct {struct}" in err
