"""Which tokens begin and end a text of a run, and which chat template goes with it? Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forge_data.sources.columns import OF_TOKENIZER, MessagesColumn
from forge_data.sources.config import TextSourceConfig
from forge_data.tokenizer.chat import ChatTemplate, in_jinja
from forge_data.tokenizer.hf import HfTokenizer, eos_ids, generation_beside
from forge_data.tokenizer.tokenizer import Tokenizer, stop_ids

from forge_trainer.config.job import Job

PROBE = [{"role": role, "content": f"{role} says"} for role in ("system", "user", "assistant", "user")]
"""A conversation that shows whether two templates differ."""


def generation_of(job: Job, tokenizer: Tokenizer) -> dict[str, Any]:
    """The `generation_config.json` of a run.

    It is that beside the tokenizer, or else of the Hugging Face folder that the weights started from. The end
    of a document and what the tokenizer calls its end are stop tokens, too.

    Args:
        job: the run.
        tokenizer: of the run.
    """
    found = generation_beside(tokenizer.folder) if isinstance(tokenizer, HfTokenizer) else {}
    for name in job.train.origins.values():
        found = found or generation_beside(Path(name))
    named = tokenizer.named_ids if isinstance(tokenizer, HfTokenizer) else {}
    bos = named.get("bos_token", next(iter(getattr(tokenizer, "bos_ids", ())), None))
    known = [one for one in eos_ids(found) if one < tokenizer.vocab_size]
    stops = list(dict.fromkeys([*stop_ids(tokenizer), *known]))
    ids = {"bos_token_id": bos, "eos_token_id": stops if len(stops) > 1 else stops[0]}
    pad = named.get("pad_token", found.get("pad_token_id"))
    return found | ids | ({} if pad is None else {"pad_token_id": pad})


def stops_of(job: Job, tokenizer: Tokenizer) -> list[int]:
    """The tokens that end what a model of a run writes."""
    return eos_ids(generation_of(job, tokenizer))


def trained_template(job: Job, tokenizer: Tokenizer) -> str | None:
    """The chat template that the conversations of a run were written with, where its tokenizer has another.

    None also where the run has no conversations, or several templates, none of which is that of the model.
    """
    texts = [source for source in job.data.sources if isinstance(source, TextSourceConfig)]
    columns = [column for source in texts if isinstance(column := source.columns(), MessagesColumn)]
    stated = {column.template for column in columns}
    if len(stated) != 1 or OF_TOKENIZER in stated:
        return None
    bos = (
        tokenizer.text_of(tokenizer.bos_ids[0])
        if isinstance(tokenizer, HfTokenizer) and tokenizer.bos_ids
        else ""
    )
    source = in_jinja(stated.pop(), bos)
    theirs, speaks = getattr(tokenizer, "chat_template", None), [False] * len(PROBE)
    if theirs is not None and _written(theirs, speaks) == _written(ChatTemplate(source), speaks):
        return None
    return source


def _written(template: ChatTemplate, speaks: list[bool]) -> str | None:
    """A conversation by a template; None where the template refuses it."""
    try:
        return template.render(PROBE, speaks)[0]
    except ValueError:
        return None
