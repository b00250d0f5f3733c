"""The keys of a `config.json`: each is read, ignored as harmless, or refused. Imports no torch."""

from __future__ import annotations

import builtins
from ast import literal_eval
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from forge_model.error import ModelError
from forge_model.hf.config import HARMLESS
from forge_model.hf.families.family import Key

_OLD = """
    add_cross_attention bad_words_ids begin_suppress_tokens cross_attention_hidden_size diversity_penalty
    early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty forced_bos_token_id
    forced_eos_token_id ignore_index is_decoder length_penalty max_length min_length no_repeat_ngram_size
    num_beam_groups num_beams num_return_sequences output_scores prefix pruned_heads remove_invalid_values
    repetition_penalty suppress_tokens tf_legacy_loss tie_encoder_decoder typical_p use_bfloat16
"""
GENERATION = frozenset(_OLD.split())
"""Keys about generation or text that older versions of `transformers` wrote into every table."""


def keyed(text: str) -> dict[str, Key]:
    """Parse the keys of a table from a text.

    Args:
        text: words `name=default`, typed like the default, or `name:type` for keys that may be null or
            absent.
    """
    found = {}
    for word in text.split():
        name, _, default = word.partition("=")
        name, _, kind = name.partition(":")
        value = literal_eval(default) if default else None
        found[name] = Key(getattr(builtins, kind) if kind else type(value), value, nullable=bool(kind))
    return found


class Keys:
    """Which keys a table of a `config.json` may have.

    Args:
        kind: `model_type` of the table, for errors.
        read: keys that are read, with their types and defaults.
        fixed: keys that are accepted only with this value, or null.
        harmless: keys that do not change the result of the model.
    """

    def __init__(
        self, kind: str, read: Mapping[str, Key], fixed: Mapping[str, Any], harmless: Iterable[str] = ()
    ) -> None:
        self.kind, self.keys, self.fixed = kind, read, fixed
        self._harmless = HARMLESS | GENERATION | {*harmless}

    def full(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys that are read, with defaults for absent ones.

        Raises:
            ModelError: keys are unknown, or have values that cannot be read; lists them all.
        """
        if problems := list(self._problems(config)):
            raise ModelError(f"this config.json of a {self.kind} cannot be read: {'; '.join(problems)}")
        return {name: config.get(name, key.default) for name, key in self.keys.items()}

    def _problems(self, config: Mapping[str, Any]) -> Iterator[str]:
        for name, value in config.items():
            if (key := self.keys.get(name)) is not None:
                if not key.accepts(value):
                    yield f"{name} = {value!r}, expected {key.kind.__name__}"
            elif name in self.fixed:
                if value is not None and value != self.fixed[name]:
                    yield f"{name} = {value!r}, only {self.fixed[name]!r} can be read"
            elif value is not None and name not in self._harmless:
                yield f"{name} = {value!r} is not known"
