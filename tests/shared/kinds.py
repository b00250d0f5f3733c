"""Small tokenizers of the kinds that models come with, trained here, in the files of Hugging Face."""

import json
from pathlib import Path

CORPUS = [
    "2+2= 4 and so on, capital letters, five is four and one",
    "user assistant system Be brief. What is the capital of France? Paris it is.",
    "na\u00efve \u6771\u4eac hello world hello",
] * 20

CONTROL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]

MARKED = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] or '' }}"
    "{% if m['tool_calls'] %}{{ m['tool_calls'] | tojson }}{% endif %}"
    "<|im_end|>{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A chat template that says what the assistant generates."""

KINDS = ("metaspace", "metaspace_first", "llama2", "bytelevel", "bytelevel_space", "wordpiece")


def made_tokenizer(folder: Path, kind: str, template: str = MARKED, **config: object) -> Path:
    """Write `tokenizer.json` and `tokenizer_config.json` of a kind."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    alphabet, control = [], CONTROL
    if kind.startswith(("metaspace", "llama2")):
        made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
        scheme = "first" if kind == "metaspace_first" else "always"
        if kind == "llama2":
            made.normalizer = normalizers.Sequence(
                [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
            )
        else:
            made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
        made.decoder = decoders.Sequence(
            [
                decoders.Replace("\u2581", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
        control = [*CONTROL, *(f"<0x{byte:02X}>" for byte in range(256))]
    elif kind.startswith("bytelevel"):
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=kind == "bytelevel_space")
        made.decoder, alphabet = decoders.ByteLevel(), pre_tokenizers.ByteLevel.alphabet()
    else:
        made = Tokenizer(models.WordPiece(unk_token="<unk>"))
        made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        made.decoder = decoders.WordPiece()
    settings = {
        "vocab_size": 700,
        "special_tokens": control,
        "initial_alphabet": alphabet,
        "show_progress": False,
    }
    kinds = {"wordpiece": trainers.WordPieceTrainer}
    made.train_from_iterator(CORPUS, kinds.get(kind, trainers.BpeTrainer)(**settings))
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    said = json.loads((folder / "tokenizer.json").read_text())
    # bytes that a model falls back to are no control tokens
    said["added_tokens"] = [one for one in said["added_tokens"] if not one["content"].startswith("<0x")]
    (folder / "tokenizer.json").write_text(json.dumps(said, ensure_ascii=False))
    if kind in ("metaspace", "metaspace_first", "llama2", "wordpiece"):
        made = Tokenizer.from_file(str(folder / "tokenizer.json"))
        suffix = " </s>" if kind == "wordpiece" else ""
        ids = [(one, made.token_to_id(one)) for one in ("<s>", "</s>")]
        made.post_processor = processors.TemplateProcessing(single=f"<s> $A{suffix}", special_tokens=ids)
        made.save(str(folder / "tokenizer.json"))
    own = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    own |= {"clean_up_tokenization_spaces": False, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(own | config))
    return folder
