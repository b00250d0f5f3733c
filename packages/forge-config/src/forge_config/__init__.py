"""Frozen, typed configuration from TOML, with every mistake reported at once."""

from forge_config.absolute import absolute as absolute
from forge_config.change import Judged as Judged
from forge_config.change import MayChange as MayChange
from forge_config.change import changeable as changeable
from forge_config.change import judge as judge
from forge_config.diff import Change as Change
from forge_config.diff import diff as diff
from forge_config.error import ForgeError as ForgeError
from forge_config.fraction import part_of as part_of
from forge_config.load import Loaded as Loaded
from forge_config.load import load as load
from forge_config.plain import digest as digest
from forge_config.plain import plain as plain
from forge_config.reference import reference_markdown as reference_markdown
from forge_config.registry import Registry as Registry
from forge_config.registry import registry_of as registry_of
from forge_config.schema import schema as schema
from forge_config.struct import ALL_KEYS as ALL_KEYS
from forge_config.struct import Config as Config
from forge_config.struct import ConfigError as ConfigError
from forge_config.struct import Meta as Meta
from forge_config.struct import sentences_from as sentences_from
from forge_config.toml import to_toml as to_toml

__all__ = [
    "ALL_KEYS",
    "Change",
    "Config",
    "ConfigError",
    "ForgeError",
    "Judged",
    "Loaded",
    "MayChange",
    "Meta",
    "Registry",
    "absolute",
    "changeable",
    "diff",
    "digest",
    "judge",
    "load",
    "part_of",
    "plain",
    "reference_markdown",
    "registry_of",
    "schema",
    "sentences_from",
    "to_toml",
]
