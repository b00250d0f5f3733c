"""Sphinx configuration; both references are generated at build time, from the structs and from docstrings."""

import dataclasses
import inspect
import re
from pathlib import Path

import forge_interp
import forge_interp.circuits
import forge_interp.sae
from forge_config.reference import reference_markdown
from forge_trainer.config.job import Job

project = "Forge"
author = "The Forge authors"
copyright = "2026, The Forge authors"
extensions = ["myst_parser", "sphinxcontrib.mermaid", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "Forge"
exclude_patterns = ["_build"]


def _help(name: str, value: object) -> str:
    """Signature and docstring, word for word."""
    try:
        call = "" if isinstance(value, property) else str(inspect.signature(value))
        call = re.sub(r"(: |-> )'([^']*)'", r"\1\2", call)  # annotations that are kept as text
    except ValueError:  # an exception has none
        call = ""
    return f"```text\n{name}{call}\n\n{inspect.getdoc(value)}{_fields(value)}\n```\n"


def _fields(value: object) -> str:
    """The public fields of a dataclass as its source has them, comments and all."""
    if not inspect.isclass(value) or not dataclasses.is_dataclass(value):
        return ""
    names = "|".join(field.name for field in dataclasses.fields(value) if field.name[0] != "_")
    lines = re.findall(rf"^    ((?:{names}): .*)$", inspect.getsource(value), re.MULTILINE)
    return "\n\n" + "\n".join(lines)


def _interp_reference() -> str:
    """Every public name of forge_interp and its methods."""
    text = (
        "# Reference\n\nEvery public name of `forge_interp`, then those of `forge_interp.circuits`, `.sae`: "
        "what it takes, returns and raises, its source.\n"
    )
    modules = (forge_interp, forge_interp.circuits, forge_interp.sae)
    for name, value in ((name, getattr(module, name)) for module in modules for name in module.__all__):
        text += f"\n## {name}\n\n{_help(name, value)}"
        bases = value.__mro__ if inspect.isclass(value) else ()
        ours = [base for base in bases if base.__module__.startswith("forge_interp")]
        for member, held in {k: v for base in reversed(ours) for k, v in vars(base).items()}.items():
            if not member.startswith("_") and (
                callable(getattr(value, member)) or isinstance(held, property)
            ):
                text += "\n" + _help(f"{name}.{member}", getattr(value, member))
    return text


_HERE = Path(__file__).parent
(_HERE / "configuration_reference.md").write_text(reference_markdown(Job))
(_HERE / "interp" / "reference.md").write_text(_interp_reference())
