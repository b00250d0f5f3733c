"""What is made when the site is built: keys, public names, configurations, exit codes, a picture."""

import base64
import dataclasses
import importlib
import inspect
import json
import re
import tomllib
from pathlib import Path
from types import ModuleType

from forge_config.reference import reference_markdown
from forge_resilience.exit_codes import ExitCode
from forge_trainer.config.job import Job

DOCS = Path(__file__).parent
CONFIGS = DOCS.parent / "configs"
PACKAGES = ("config", "model", "parallel", "data", "ckpt", "resilience", "vlm")
"""Those with a page of their own in `reference/`; that of forge-interp stands beside its guides."""


def write_pages() -> None:
    """Write all of them into the folder of the documentation, from which git leaves them out."""
    folder = DOCS / "reference"
    (DOCS / "configuration_reference.md").write_text(reference_markdown(Job))
    names = ("circuits", "sae", "recordings", "pictures")
    parts = ("forge_interp", *(f"forge_interp.{name}" for name in names))
    (DOCS / "interp" / "reference.md").write_text("\n".join(api_page(part, members=True) for part in parts))
    for package in PACKAGES:
        (folder / f"forge-{package}.md").write_text(api_page(f"forge_{package}"))
    (folder / "configs.md").write_text(configs_page())
    (folder / "exit_codes.md").write_text(exit_codes_page())
    (folder / "attention.png").write_bytes(
        picture("attention", "Attention patterns of the four heads of layer 1")
    )


def picture(notebook: str, alt: str) -> bytes:
    """The PNG that a notebook shows, by the beginning of its alt text."""
    book = json.loads((DOCS / "notebooks" / f"{notebook}.ipynb").read_text())
    (cell,) = [one for one in book["cells"] if _alt(one).startswith(alt)]
    (png,) = [one["data"]["image/png"] for one in cell["outputs"] if "image/png" in one.get("data", {})]
    return base64.b64decode(png)


def _alt(cell: dict) -> str:
    return cell["metadata"].get("mystnb", {}).get("image", {}).get("alt", "")


def api_page(package: str, members: bool = False) -> str:
    """Every public name of a package: its signature and its docstring, word for word.

    Args:
        package: to be imported.
        members: with the public methods and properties of its classes.
    """
    module = importlib.import_module(package)
    title = package.replace("_", "-")
    text = f"# {title}\n\n{module.__doc__}\n\nEvery public name: what it takes, returns and raises.\n"
    for name in sorted(module.__all__):
        value = getattr(module, name)
        if isinstance(value, ModuleType):
            continue
        text += f"\n## {name}\n\n{_help(name, value)}"
        for member in _members(value) if members else ():
            text += "\n" + _help(f"{name}.{member}", getattr(value, member))
    return text


def _members(value: object) -> list[str]:
    """The public methods and properties of a class of Forge, those of its bases first."""
    if not inspect.isclass(value):
        return []
    ours = [base for base in value.__mro__ if base.__module__.startswith("forge_")]
    held = {name: one for base in reversed(ours) for name, one in vars(base).items()}
    return [
        name
        for name, one in held.items()
        if not name.startswith("_") and (callable(getattr(value, name)) or isinstance(one, property))
    ]


def _help(name: str, value: object) -> str:
    try:
        call = "" if isinstance(value, property) else str(inspect.signature(value))  # type: ignore[arg-type]
        call = re.sub(r"(: |-> )'([^']*)'", r"\1\2", call)  # annotations that are kept as text
    except (TypeError, ValueError):  # an exception has none, nor has a constant
        call = ""
    doc = inspect.getdoc(value) if call or inspect.isclass(value) or isinstance(value, property) else None
    return f"```text\n{name}{call}\n\n{doc or _shown(value)}{_fields(value)}\n```\n"


def _shown(value: object) -> str:
    """A constant, as far as a line shows it."""
    text = repr(value)
    return text if len(text) < 100 else f"{text[:97]}..."


def _fields(value: object) -> str:
    """The public fields of a dataclass as its source has them, comments and all."""
    if not inspect.isclass(value) or not dataclasses.is_dataclass(value):
        return ""
    names = "|".join(field.name for field in dataclasses.fields(value) if field.name[0] != "_")
    lines = re.findall(rf"^    ((?:{names}): .*)$", inspect.getsource(value), re.MULTILINE)
    return "\n\n" + "\n".join(lines)


def configs_page() -> str:
    """Each file of `configs/` with the sentence at its head."""
    text = (
        "# Configurations that are there\n\nEvery file can be extended by yours (`extends`) or run as it is; "
        "see [Configuration](../configuration.md).\n"
    )
    for folder in sorted(path for path in CONFIGS.iterdir() if path.is_dir()):
        files = sorted(folder.glob("*.toml"))
        rows = "".join(f"| `{path.relative_to(CONFIGS.parent)}` | {_sentence(path)} |\n" for path in files)
        text += f"\n## {folder.name}\n\n| file | what it is |\n|---|---|\n{rows}"
    return text


def _sentence(path: Path) -> str:
    """The comment at the head of a file, or else the sections it has."""
    lines = path.read_text().splitlines()
    comment = [line.removeprefix("#").strip() for line in lines[: _length(lines)]]
    return " ".join(comment) or f"sections {', '.join(tomllib.loads(path.read_text()))}"


def _length(lines: list[str]) -> int:
    return next((index for index, line in enumerate(lines) if not line.startswith("#")), len(lines))


def exit_codes_page() -> str:
    """The codes with which `forge` ends, in the words of the source."""
    source = inspect.getsource(ExitCode)
    rows = re.findall(r"^    (\w+) = (\d+)\n    \"\"\"(.*?)\"\"\"", source, re.MULTILINE | re.DOTALL)
    assert {name for name, *_ in rows} == {code.name for code in ExitCode}
    table = "".join(f"| {number} | `{name}` | {' '.join(said.split())} |\n" for name, number, said in rows)
    return f"# Exit codes\n\n| code | name | meaning |\n|---|---|---|\n{table}"
