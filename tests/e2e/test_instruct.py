"""Three instruct-style models and one that adds BOS, tuned on chats: nothing differs from `transformers`."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from forge_ckpt.error import CheckpointError
from forge_data.sources.columns import MessagesColumn
from forge_data.tokenizer.encoding import encoded
from forge_trainer.cli import main
from forge_trainer.commands.verify_export import require_tokens
from forge_trainer.run_dir.files import read_job
from instruct import CORPUS, KINDS, TASKS, conversations, instruct_model, write_rows, write_tasks
from msgspec.structs import replace

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

JOB = """
[job]
name = "tuned"
root = "{root}"

[model]
from = "{model}"

[data]
max_tokens = 256
packing = "pad"
workers = 0
tokenize_workers = 1
cache_dir = "{root}/cache"
tokenizer = {{ type = "hf", path = "{model}", eos = "{eos}" }}

[[data.sources]]
type = "hf"
path = "{rows}"
messages = "messages"
template = "tokenizer"
held_out = 0.0

[train]
init_from = "{model}"
steps = 3
global_batch = 24
micro_batch = 8
log_every_steps = 1

[optimizer]
type = "adamw"
lr = 1e-3

[schedule]
type = "constant"

[eval]
every_steps = 0
"""


@pytest.fixture(scope="module", params=KINDS)
def tuned(request, tmp_path_factory):
    """A folder with the model as published, its run and its export; and the model of `transformers`."""
    root = tmp_path_factory.mktemp(request.param)
    model, tokenizer = instruct_model(request.param, root / "model")
    rows = write_rows(root / "rows.jsonl", [{"messages": chat} for chat in conversations()])
    eos = KINDS[request.param][2]["eos_token"]
    (root / "job.toml").write_text(JOB.format(root=root, model=root / "model", rows=rows, eos=eos))
    command = [sys.executable, "-m", "forge_trainer", "train", str(root / "job.toml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert main(["export", str(root / "tuned"), str(root / "export")]) == 0
    return root, model, tokenizer


def exported(root):
    """What `transformers` loads of the export."""
    model = transformers.AutoModelForCausalLM.from_pretrained(root / "export", dtype=torch.float32).eval()
    return model, transformers.AutoTokenizer.from_pretrained(root / "export")


def targets_of(tokenizer, chat):
    """The ids of a chat and which of them the assistant says, from `transformers` alone."""
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    ids = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False)
    if "{% generation %}" in tokenizer.chat_template:
        options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        return text, ids, tokenizer.apply_chat_template(chat, **options)["assistant_masks"]
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True).offset_mapping
    said = [False] * len(ids)
    for number, turn in enumerate(chat):
        if turn["role"] == "assistant":
            start = len(
                tokenizer.apply_chat_template(chat[:number], tokenize=False, add_generation_prompt=True)
            )
            stop = len(tokenizer.apply_chat_template(chat[: number + 1], tokenize=False))
            within = [n for n, (a, b) in enumerate(offsets) if a < stop and b > start]
            said[within[0] : within[-1] + 1] = [True] * (within[-1] + 1 - within[0])
    return text, ids, [int(one) for one in said]


def test_chats_are_written_encoded_and_masked_as_transformers_does(tuned):
    root, _, tokenizer = tuned
    ours = read_job(root / "tuned").data.tokenizer.build()
    for chat in conversations():
        document = MessagesColumn(template="tokenizer").document({"messages": chat}, ours)
        text, ids, said = targets_of(tokenizer, chat)
        assert document.text == text
        found, mask = encoded(ours, document, True)
        assert found.tolist()[: len(ids)] == ids and len(found) <= len(ids) + 1
        assert found.tolist()[len(ids) :] in ([], [ours.eos_id])
        assert mask[: len(ids)].astype(int).tolist() == said
        assert 0 < sum(said) < len(ids)


@torch.no_grad()
def test_first_loss_is_that_of_transformers_on_what_the_assistant_says(tuned):
    root, model, tokenizer = tuned
    ours = read_job(root / "tuned").data.tokenizer.build()
    total, count = 0.0, 0
    for chat in conversations():
        _, ids, said = targets_of(tokenizer, chat)
        if (
            ids[-1] != ours.eos_id
        ):  # a document ends, which is said where the assistant said the last character
            ids, said = [*ids, ours.eos_id], [*said, "{% generation %}" not in tokenizer.chat_template]
        logits = model(torch.tensor([ids])).logits[0, :-1].double()
        losses = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")
        wanted = torch.tensor(said[1:], dtype=torch.bool)
        total, count = total + losses[wanted].sum().item(), count + int(wanted.sum())
    first = json.loads((root / "tuned" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["loss"] == pytest.approx(total / count, rel=1e-5)


def test_answers_of_the_run_are_those_of_its_export(tuned, tmp_path, capsys):
    root = tuned[0]
    model, tokenizer = exported(root)
    chats = [[*chat[:2], {"role": "user", "content": "why?"}] for chat in conversations(7)]
    asked = [tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True) for c in chats]
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": text} for text in asked])
    flags = ["--temperature", "0", "--max-new-tokens", "25", "--batch-size", "3"]
    assert main(["generate", str(root / "tuned"), "--prompts", str(prompts), *flags]) == 0
    found = [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()]
    assert main(["generate", str(root / "export"), "--prompts", str(prompts), *flags]) == 0
    again = [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()]
    expected = []
    for chat in chats:
        options = {
            "tokenize": True,
            "add_generation_prompt": True,
            "return_tensors": "pt",
            "return_dict": False,
        }
        ids = tokenizer.apply_chat_template(chat, **options)
        new = model.generate(ids, max_new_tokens=25, do_sample=False)[0, ids.shape[1] :]
        expected.append(tokenizer.decode(new, skip_special_tokens=True))
    assert found == expected == again


def test_export_has_template_stops_and_tokens_of_the_model(tuned):
    root, before, was = tuned
    model, tokenizer = exported(root)
    assert main(["verify-export", str(root / "tuned"), str(root / "export")]) == 0
    assert tokenizer.chat_template == was.chat_template
    assert {*ids(model.generation_config.eos_token_id)} >= {*ids(before.generation_config.eos_token_id)}
    assert model.generation_config.bos_token_id == before.generation_config.bos_token_id
    assert model.generation_config.pad_token_id == before.generation_config.pad_token_id
    named = ("bos_token", "eos_token", "pad_token", "unk_token")
    assert [getattr(tokenizer, name) for name in named] == [getattr(was, name) for name in named]
    for text in [*CORPUS[:5], "", " x", "a  b\n\n", "<s>[EOT]<|im_end|>"]:
        assert tokenizer(text).input_ids == was(text).input_ids
        assert (
            tokenizer(text, add_special_tokens=False).input_ids
            == was(text, add_special_tokens=False).input_ids
        )
        assert tokenizer.decode(was(text).input_ids) == was.decode(was(text).input_ids)
    for chat in conversations(4):
        assert tokenizer.apply_chat_template(chat) == was.apply_chat_template(chat)


def test_tokenizer_that_transformers_replaces_is_told(tuned, tmp_path):
    root = tuned[0]
    shutil.copytree(root / "export", tmp_path / "export")
    file = tmp_path / "export" / "tokenizer.json"
    other = json.loads(file.read_text())
    other["pre_tokenizer"] = {"type": "Digits", "individual_digits": True}
    file.write_text(json.dumps(other))
    job = read_job(root / "tuned")
    tokenizer = replace(job.data.tokenizer, path=str(file))
    job = replace(job, data=replace(job.data, tokenizer=tokenizer))
    if root.name.startswith("bytelevel"):  # of a Qwen2, whose tokenizer transformers makes of the vocabulary
        with pytest.raises(CheckpointError, match=r"here a Qwen2Tokenizer, reads .*PreTrainedTokenizerFast"):
            require_tokens(job, tmp_path / "export")
    else:
        require_tokens(job, tmp_path / "export")


def test_tasks_on_the_run_say_what_the_harness_says_of_the_export(tuned, tmp_path):
    evaluator = pytest.importorskip("lm_eval.evaluator")
    from lm_eval.tasks import TaskManager

    root, out = tuned[0], tmp_path / "found.json"
    tasks = write_tasks(tmp_path / "tasks", ["no"] * 5)
    flags = ["--tasks-from", str(tasks), "--json", str(out), "--batch-size", "3"]
    assert main(["eval", str(root / "tuned"), "--tasks", ",".join(TASKS), *flags]) == 0
    theirs = evaluator.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(root / "export"), "dtype": "float32"},
        tasks=list(TASKS),
        task_manager=TaskManager(include_path=str(tasks)),
        device="cpu",
        batch_size=2,
        log_samples=False,
    )
    ours, expected = numbers(json.loads(out.read_text())), numbers(theirs["results"])
    assert len(ours) >= 5 and ours == pytest.approx(expected, rel=1e-5)


def ids(one):
    return one if isinstance(one, list) else [one]


def numbers(results):
    return {
        f"{task}/{name}": value
        for task, found in results.items()
        for name, value in found.items()
        if isinstance(value, float) and "stderr" not in name
    }
