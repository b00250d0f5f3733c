"""Small instruct-style models with random weights and tokenizers of each kind, saved as the hub has them."""

import json
from pathlib import Path

import torch

CORPUS = [
    "the quick brown fox jumps over the lazy dog, and then sleeps for 12 hours",
    "What is the capital of France? The capital of France is Paris.",
    "def encode(self, text):\n    return [self.ids[word] for word in text.split()]",
    "Straße, naïve café, 東京 and emoji 🙂 are text as well; so are 1+1=2 and 3.14159",
    "Please write a short poem about the sea. Waves roll in, waves roll out.",
] * 4

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INST = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}[INST] "
    "{{ message.content }} [/INST]{% elif message.role == 'assistant' %} {{ message.content }}"
    "{{ eos_token }}{% endif %}{% endfor %}"
)
MARKED = (
    "{% for message in messages %}{% if message.role == 'assistant' %}[ASSISTANT] {% generation %}"
    "{{ message.content | trim }} [EOT]{% endgeneration %} {% else %}[{{ message.role | upper }}] "
    "{{ message.content | trim }} [EOT] {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[ASSISTANT] {% endif %}"
)
HEADERS = (
    "{{ bos_token }}{% for message in messages %}<|start|>{{ message.role }}<|end|>\n\n"
    "{{ message.content | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
)


def _bytelevel(special, prefix):
    """As GPT-2 with a space before; without, as Qwen2, of which `transformers` knows no other tokenizer."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    made = Tokenizer(models.BPE())
    if prefix:
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    else:
        split = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), "isolated")
        letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.normalizer = normalizers.NFC()
        made.pre_tokenizer = pre_tokenizers.Sequence([split, letters])
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    )
    return made


def _metaspace(special):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made.decoder = decoders.Metaspace(prepend_scheme="first")
    made.train_from_iterator(
        CORPUS, trainers.UnigramTrainer(vocab_size=300, special_tokens=special, unk_token="<unk>")
    )
    return made


def _wordpiece(special):
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=special))
    return made


def _begun(made, bos):
    from tokenizers import processors

    single = f"{bos} $A"
    made.post_processor = processors.TemplateProcessing(
        single=single, pair=f"{single} {bos} $B", special_tokens=[(bos, made.token_to_id(bos))]
    )
    return made


KINDS = {
    "bytelevel": (
        "qwen2",
        CHATML,
        {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        ["<|im_end|>", "<|endoftext|>"],
    ),
    "metaspace": ("llama", INST, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}, ["</s>"]),
    "wordpiece": (
        "mistral",
        MARKED,
        {"eos_token": "[SEP]", "unk_token": "[UNK]", "pad_token": "[PAD]"},
        ["[SEP]", "[EOT]"],
    ),
    "headers": (
        "llama",
        HEADERS,
        {"bos_token": "<|begin|>", "eos_token": "<|eot|>"},
        ["<|stop|>", "<|eot|>"],
    ),
}
"""Type of the model, chat template, named special tokens, and stop tokens of generation."""


def _tokenizer(kind):
    if kind == "bytelevel":
        return _bytelevel(["<|endoftext|>", "<|im_start|>", "<|im_end|>"], False)
    if kind == "metaspace":
        return _begun(_metaspace(["<unk>", "<s>", "</s>"]), "<s>")
    if kind == "wordpiece":
        return _wordpiece(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[EOT]", "[USER]", "[SYSTEM]", "[ASSISTANT]"])
    return _begun(_bytelevel(["<|begin|>", "<|stop|>", "<|start|>", "<|end|>", "<|eot|>"], True), "<|begin|>")


def instruct_model(kind: str, folder: Path, seed: int = 0):
    """Save model and tokenizer of a kind in a folder; returns those of `transformers`."""
    import transformers

    model_type, template, named, stops = KINDS[kind]
    made = _tokenizer(kind)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, clean_up_tokenization_spaces=False, model_max_length=256, **named
    )
    tokenizer.chat_template = template
    ids = [made.token_to_id(stop) for stop in stops]
    config = transformers.models.auto.configuration_auto.CONFIG_MAPPING[model_type](
        vocab_size=made.get_vocab_size() + 5, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=ids[-1], pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=kind == "bytelevel",
    )  # fmt: skip
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=ids, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, transformers.AutoTokenizer.from_pretrained(folder)


def conversations(count: int = 24) -> list[list[dict[str, str]]]:
    """Chats of one and two questions, some after a system prompt."""
    said = ["Waves roll in.", "Paris", " it is 12 ", "1+1=2\nso it is", "naïve café 🙂"]
    rows = []
    for i in range(count):
        turns = [{"role": "user", "content": CORPUS[i % 5]}, {"role": "assistant", "content": said[i % 5]}]
        if i % 3 == 1:
            turns += [
                {"role": "user", "content": "and then?"},
                {"role": "assistant", "content": said[(i + 2) % 5]},
            ]
        rows.append(turns)
    return rows


def write_rows(path: Path, rows) -> Path:
    """A file of JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


TASKS = {
    "choice": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: 0
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "whole": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}, {metric: word_perplexity}]
""",
    "written": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 9}
metric_list: [{metric: exact_match}]
""",
}
"""Tasks of lm-evaluation-harness: likelihood of choices and of whole texts, and answers that are written."""


def write_tasks(folder: Path, answers: list[str]) -> Path:
    """The tasks over rows of a local file, whose answers are given."""
    folder.mkdir()
    rows = [
        {
            "question": CORPUS[i % 5][: 20 + i],
            "choices": [" fox", "Paris is", "1+1"],
            "text": CORPUS[i % 5],
            "answer": a,
        }
        for i, a in enumerate(answers)
    ]
    data = write_rows(folder / "rows.jsonl", rows)
    for name, text in TASKS.items():
        source = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test\n"
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{text}{source}")
    return folder
