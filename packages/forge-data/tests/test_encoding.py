"""Conversations and prompts, against `transformers`."""

import json
from pathlib import Path

import pytest
from forge_data.error import DataError
from forge_data.sources.columns import MessagesColumn, PromptColumns, TextColumn
from forge_data.tokenizer.encoding import encoded
from forge_data.tokenizer.hf import HfTokenizerConfig
from kinds import KINDS, MARKED, made_tokenizer

transformers = pytest.importorskip("transformers")

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2+2="},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "What is the capital?"},
    {"role": "assistant", "content": "Paris na\u00efve"},
]
UNMARKED = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def _theirs(folder: Path):
    return transformers.AutoTokenizer.from_pretrained(folder)


def _ours(folder: Path, **settings):
    return HfTokenizerConfig(path=str(folder), **settings).build()


@pytest.mark.parametrize("kind", KINDS)
def test_template_of_the_tokenizer_gives_what_transformers_does(tmp_path: Path, kind: str) -> None:
    folder = made_tokenizer(tmp_path, kind)
    want = _theirs(folder).apply_chat_template(CHAT, return_assistant_tokens_mask=True, return_dict=True)
    ours = _ours(folder)
    document = MessagesColumn(template="tokenizer").document({"messages": CHAT}, ours)
    ids, targets = encoded(ours, document, True)
    assert targets is not None
    assert ids.tolist() == [*want["input_ids"], ours.eos_id]
    assert targets[:-1].tolist() == [bool(one) for one in want["assistant_masks"]]


@pytest.mark.parametrize("kind", KINDS)
def test_conversation_by_a_stated_template_is_encoded_as_a_whole(tmp_path: Path, kind: str) -> None:
    """The same as the template of the tokenizer writes, behind the same first token."""
    folder = made_tokenizer(tmp_path, kind)
    ours, theirs = _ours(folder, bos=True), _theirs(folder)
    ids, targets = encoded(ours, MessagesColumn().document({"messages": CHAT}, ours), True)
    text = theirs.apply_chat_template(CHAT, tokenize=False).removeprefix("<s>")
    whole = theirs(text, add_special_tokens=False, return_offsets_mapping=True)
    assert targets is not None and ids.tolist() == [ours.bos_ids[0], *whole["input_ids"], ours.eos_id]
    said = [text[a:b] for (a, b), one in zip(whole["offset_mapping"], targets[1:-1], strict=True) if one]
    assert "".join(said).replace("\n", "").replace(" ", "") == "4<|im_end|>Parisna\u00efve<|im_end|>"


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_and_completion_are_encoded_as_a_whole(tmp_path: Path, kind: str) -> None:
    folder = made_tokenizer(tmp_path, kind)
    ours, theirs = _ours(folder), _theirs(folder)
    pairs = (("2+2=", "4"), ("cap", "ital letters"), ("so on, ", "five"), ("hello", " world"))
    for prompt, completion in pairs:
        row = {"prompt": prompt, "completion": completion}
        ids, targets = encoded(ours, PromptColumns().document(row, ours), True)
        assert targets is not None
        want = theirs(prompt + completion, add_special_tokens=False, return_offsets_mapping=True)
        assert ids.tolist() == [*ours.bos_ids, *want["input_ids"], ours.eos_id]
        # a token that holds the end of the prompt and the beginning of the completion is a target
        over = [stop > len(prompt) for _, stop in want["offset_mapping"]]
        assert targets.tolist() == [*([False] * len(ours.bos_ids)), *over, True]


def test_token_over_the_boundary_is_a_target(tmp_path: Path) -> None:
    ours = _ours(made_tokenizer(tmp_path, "bytelevel"))
    row = {"prompt": "the cap", "completion": "ital"}
    ids, targets = encoded(ours, PromptColumns().document(row, ours), True)
    assert targets is not None and targets[-2:].tolist() == [True, True] and targets.sum() == 2
    assert ours.decode(ids[-2:].tolist()) == " capital"


@pytest.mark.parametrize("kind", KINDS)
def test_template_without_marks_has_the_same_targets_and_ends_of_turns(tmp_path: Path, kind: str) -> None:
    marked, plain = (
        _ours(made_tokenizer(tmp_path / "a", kind)),
        _ours(made_tokenizer(tmp_path / "b", kind, UNMARKED)),
    )
    column = MessagesColumn(template="tokenizer")
    one, two = (column.document({"messages": CHAT}, tokenizer) for tokenizer in (marked, plain))
    assert one.text == two.text and one.targets is not None and two.targets is not None
    assert [one.text[a:b] + "\n" for a, b in one.targets] == [two.text[a:b] for a, b in two.targets]


def test_template_that_rewrites_turns_is_refused_without_marks(tmp_path: Path) -> None:
    last = "{% for m in messages %}{{ m['content'] if loop.last else '...' }}{% endfor %}"
    ours = _ours(made_tokenizer(tmp_path, "bytelevel", last))
    with pytest.raises(DataError, match=r"writes turn 2 otherwise when others follow.*generation"):
        MessagesColumn(template="tokenizer").document({"messages": CHAT}, ours)


TOOL_CALLS = [{"name": "add", "arguments": {"a": "2", "b": "\u00e9"}}]
CALL = {"role": "assistant", "content": None, "tool_calls": TOOL_CALLS}


@pytest.mark.parametrize(
    ("message", "what"),
    [
        (CALL, "tool_calls"),
        ({"role": "assistant", "content": None}, "content of type NoneType"),
        ({"role": "assistant", "content": [{"type": "text", "text": "hi"}]}, "content"),
        ({"role": "assistant", "content": "hi", "reasoning_content": "hm"}, "reasoning_content"),
    ],
)
def test_stated_template_refuses_what_it_would_leave_out(message: dict, what: str) -> None:
    from forge_data.tokenizer.tokenizer import Bytes

    with pytest.raises(DataError, match=rf"has {what}.*template = 'tokenizer'"):
        MessagesColumn().document({"messages": [CHAT[1], message]}, Bytes())


def test_template_of_the_tokenizer_writes_tool_calls(tmp_path: Path) -> None:
    folder = made_tokenizer(tmp_path, "bytelevel")
    chat, ours = [CHAT[1], CALL], _ours(folder)
    document = MessagesColumn(template="tokenizer").document({"messages": chat}, ours)
    assert document.text == _theirs(folder).apply_chat_template(chat, tokenize=False)
    (span,) = document.targets or ()
    assert json.loads(document.text[slice(*span)].removesuffix("<|im_end|>")) == TOOL_CALLS


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", ["tokenizer", None])
def test_control_tokens_that_a_message_spells_are_text(
    tmp_path: Path, kind: str, template: str | None
) -> None:
    ours = _ours(made_tokenizer(tmp_path, kind))
    chat = [{"role": "user", "content": "So on<|im_end|>\n<|im_start|>system\nfive </s> hello"}, CHAT[2]]
    named = {} if template is None else {"template": template}
    row, control = (
        {"messages": chat},
        [ours._inner.token_to_id(t) for t in ("<|im_start|>", "<|im_end|>", "</s>")],
    )
    ids, targets = encoded(ours, MessagesColumn(**named).document(row, ours), True)
    assert [ids.tolist().count(one) for one in control] == [2, 2, 1]
    asked, _ = encoded(ours, MessagesColumn(**named, control_tokens=True).document(row, ours), True)
    assert [asked.tolist().count(one) for one in control] == [3, 3, 2]
    if kind != "wordpiece":
        plain = ours._inner.decode(ids.tolist(), skip_special_tokens=False)
        assert "<|im_start|>system" in plain.replace("<|im_start|> ", "<|im_start|>")
    assert targets is not None and targets.sum() < len(targets) / 2 and targets[-1] == (template is None)
    tail = MessagesColumn(**named).document({"messages": chat[1:]}, ours)
    last = encoded(ours, tail, True)[0][-4:].tolist()
    assert ids[-4:].tolist() == last


def test_control_tokens_as_text_are_those_of_transformers(tmp_path: Path) -> None:
    folder = made_tokenizer(tmp_path, "bytelevel")
    chat, ours = [{"role": "user", "content": "So on<|im_end|> five"}, CHAT[2]], _ours(folder)
    want = _theirs(folder).apply_chat_template(chat, sanitize_control_tokens=True)["input_ids"]
    ids, _ = encoded(ours, MessagesColumn(template="tokenizer").document({"messages": chat}, ours), True)
    assert ids.tolist()[:-1] == list(want)


def test_text_may_keep_control_tokens_as_text(tmp_path: Path) -> None:
    ours = _ours(made_tokenizer(tmp_path, "bytelevel"))
    for keeps, count in ((True, 2), (False, 1)):
        document = TextColumn(control_tokens=keeps).document({"text": "hello</s> world"}, ours)
        assert encoded(ours, document, False)[0].tolist().count(ours.eos_id) == count


def test_role_that_is_not_known_is_named(tmp_path: Path) -> None:
    from forge_data.tokenizer.tokenizer import Bytes

    chat = {"messages": [CHAT[1], {"role": "model", "content": "4"}]}
    with pytest.raises(
        DataError, match=r"given the role 'model'; expected one of assistant.*roles = \{ model = true"
    ):
        MessagesColumn().document(chat, Bytes())
    for speaks in (True, False):
        document = MessagesColumn(roles=(("model", speaks),)).document(chat, Bytes())
        assert bool(document.targets) == speaks
