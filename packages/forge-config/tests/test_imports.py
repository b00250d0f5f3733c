import sys

import pytest
from forge_config import Config, Registry, load, to_toml


class Part(Config):
    """Interface."""


parts = Registry("part", Part)


class Job(Config):
    part: Part | None = None
    parts: dict[str, Part] = {}


@pytest.fixture(autouse=True)
def clean_imports(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in [name for name in sys.modules if name.startswith("plug_")]:
        del sys.modules[name]


def plug(folder, name, type_name):
    (folder / f"{name}.py").write_text(
        "from forge_config.registry import _by_interface\n"
        "interface = next(i for i in _by_interface if i.__name__ == 'Part')\n"
        f"@_by_interface[interface].register({type_name!r})\n"
        "class Mine(interface):\n"
        "    n: int = 1\n"
    )


def test_imports_beside_the_file_join_the_registry(load_text, tmp_path):
    plug(tmp_path, "plug_beside", "beside")
    job = load_text(Job, 'imports = ["plug_beside"]\npart = {type = "beside", n = 3}').value
    assert job.part.n == 3


def test_resolved_toml_with_its_imports_can_be_loaded_again(load_text, tmp_path):
    plug(tmp_path, "plug_again", "again")
    loaded = load_text(Job, 'imports = ["plug_again"]\npart.type = "again"')
    assert loaded.imports == ("plug_again",)
    written = to_toml(loaded.value, imports=loaded.imports)
    assert load_text(Job, written).value == loaded.value


def test_imports_of_the_working_directory_join_the_registry(load_text, tmp_path, monkeypatch):
    (tmp_path / "cwd").mkdir()
    plug(tmp_path / "cwd", "plug_cwd", "cwd")
    monkeypatch.chdir(tmp_path / "cwd")
    assert load_text(Job, 'imports = ["plug_cwd"]\npart.type = "cwd"').value.part.n == 1


def test_imports_are_looked_for_in_more_folders_last(tmp_path):
    for folder, names in (("first", ["here"]), ("last", ["here", "there"])):
        (tmp_path / folder).mkdir()
        for name in names:
            plug(tmp_path / folder, f"plug_{name}", f"{name}-{folder}")
    folders = [tmp_path / "first", tmp_path / "last"]
    (tmp_path / "job.toml").write_text(
        'imports = ["plug_here", "plug_there"]\nparts.a.type = "here-first"\nparts.b.type = "there-last"'
    )
    assert load(Job, tmp_path / "job.toml", import_folders=folders).value.parts["a"].n == 1


def test_imports_of_all_layers_and_flags_are_made(load_text, tmp_path):
    for name in "abc":
        plug(tmp_path, f"plug_{name}", f"type_{name}")
    job = load_text(
        Job,
        'extends = "base.toml"\nimports = ["plug_a"]\nparts.x.type = "type_a"\nparts.y.type = "type_b"',
        ["--imports=['plug_c']", "--parts.z.type=type_c"],
        base='imports = ["plug_b"]',
    ).value
    assert len(job.parts) == 3


def test_failing_imports_are_problems_beside_the_others(mistakes, tmp_path):
    (tmp_path / "plug_broken.py").write_text("x = 1\nundefined_name\n")
    (tmp_path / "plug_syntax.py").write_text("def\n")
    found = mistakes(Job, 'imports = [\n"plug_none", "plug_broken", "plug_syntax", 3]\nprat = 1')
    assert [line.split(": ")[1] for line in found] == ["imports"] * 4 + ["prat"]
    text = "\n".join(found)
    assert "module plug_none cannot be imported: No module named 'plug_none'" in text
    assert (
        "plug_broken cannot be imported: NameError: name 'undefined_name' is not defined (plug_broken.py:2)"
        in text
    )
    assert "plug_syntax cannot be imported: SyntaxError" in text
    assert "given 3; expected the dotted name of a module" in text


def test_imports_must_be_an_array(mistakes):
    assert mistakes(Job, 'imports = "plug_a"') == [
        "  job.toml:1: imports: given 'plug_a'; expected an array of module names, as in ['my_lab']"
    ]


@pytest.mark.parametrize(
    "statement", ["sys.exit(0)", "raise SystemExit", "raise Exception('mine')", "sys.exit('x')"]
)
def test_module_that_raises_anything_or_exits_is_a_problem(mistakes, tmp_path, statement):
    (tmp_path / "plug_exits.py").write_text(f"import sys\n{statement}\n")
    (line,) = mistakes(Job, 'imports = ["plug_exits"]')
    assert "module plug_exits cannot be imported" in line and "plug_exits.py:2" in line
