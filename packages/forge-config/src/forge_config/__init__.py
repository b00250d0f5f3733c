"""Frozen, typed configuration from TOML, with every mistake reported at once."""

from forge_config.describe import reference_markdown as reference_markdown
from forge_config.describe import schema as schema
from forge_config.diff import Change as Change
from forge_config.diff import diff as diff
from forge_config.load import Loaded as Loaded
from forge_config.load import load as load
from forge_config.plain import digest as digest
from forge_config.plain import plain as plain
from forge_config.plain import to_toml as to_toml
from forge_config.registry import Registry as Registry
from forge_config.struct import Config as Config
from forge_config.struct import ConfigError as ConfigError
from forge_config.struct import Meta as Meta

__all__ = [
    "Change",
    "Config",
    "ConfigError",
    "Loaded",
    "Meta",
    "Registry",
    "diff",
    "digest",
    "load",
    "plain",
    "reference_markdown",
    "schema",
    "to_toml",
]
