"""Questions of lm-evaluation-harness that show images, asked of runs with a vision-language model."""

import io
import json

import numpy as np
import pytest
import torch
from forge_config import ConfigError
from forge_trainer.run_dir.files import load_job
from seeing import image

pytest.importorskip("lm_eval")
datasets = pytest.importorskip("datasets")
from forge_trainer.commands.harness import RunModel, SeeingModel  # noqa: E402 - needs the harness
from lm_eval.api.instance import Instance  # noqa: E402
from PIL import Image  # noqa: E402


@pytest.fixture
def asked(seeing):
    """A small model with random weights, as the harness is given it, by its class."""
    job = load_job(seeing()).value
    torch.manual_seed(0)
    model = job.model.build().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    tokenizer = job.data.tokenizer.build()
    return lambda kind=SeeingModel, batch=2: kind(model, tokenizer, batch)


@pytest.fixture
def given(monkeypatch):
    """The patches that each batch is given, in the place of an answer."""
    found = []

    def spy(model, tokens, *args, inputs, **options):
        found.append(inputs["patches"])

    monkeypatch.setattr("forge_trainer.commands.harness.generate", spy)
    return found


def question(text, *beside, task="seen", kind="generate_until"):
    said = "answer" if kind == "loglikelihood" else {"until": ["#"], "max_gen_toks": 6}
    return Instance(kind, {}, (text, said, *beside), 0, (task, 0, 1))


def files():
    """By name, images whose pixels hang on more than their colours."""
    random = np.random.default_rng(0)
    noise = random.integers(0, 256, (12, 20, 4), dtype=np.uint8)
    turned = Image.Exif()
    turned[0x0112] = 6
    made = {
        "colour": (Image.fromarray(noise[..., :3]), {"format": "png"}),
        "transparent": (Image.fromarray(noise), {"format": "png"}),
        "grey": (Image.fromarray(noise[..., 2:].copy(), "LA"), {"format": "png"}),
        "turned": (Image.fromarray(noise[..., :3]), {"format": "png", "exif": turned}),
    }
    for name, (one, options) in made.items():
        file = io.BytesIO()
        one.save(file, **options)
        yield name, file.getvalue()


FILES = dict(files())


@pytest.mark.parametrize("name", FILES)
def test_image_of_a_question_is_read_as_a_file_with_it_is(asked, given, name):
    model, raw = asked(), FILES[name]
    for shown in (Image.open(io.BytesIO(raw)), [Image.open(io.BytesIO(raw))]):
        model.generate_until([question("<image>colour? ", {"visual": shown})])
    expected = model._model.config.prompt("<image>colour? ", [raw], model._tokenizer).inputs["patches"]
    for patches in given:
        assert patches.numpy().tolist() == expected.tolist()
    assert len(given) == 2


BROKEN = FILES["colour"][:400]
WRONG = {
    "no image": ({"visual": ["a.png"]}, "gives str"),
    "damaged": ({"visual": [Image.open(io.BytesIO(BROKEN))]}, "is damaged"),
    "sound": ({"visual": [], "audio": [b""]}, "gives audio beside its text"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_image_is_told_as_such(asked, case):
    beside, said = WRONG[case]
    with pytest.raises(ConfigError, match=said):
        asked().generate_until([question("colour? ", beside)])


def test_long_question_without_an_image_keeps_its_end_as_for_a_model_of_text(asked):
    questions = [question("much ado about nothing " * count) for count in (1, 9, 30)]
    assert asked().generate_until(questions) == asked(RunModel).generate_until(questions)
    red = {"visual": Image.new("RGB", (9, 9), "red")}
    with pytest.raises(ConfigError, match="with its images"):
        asked().generate_until([question("<image>" + "much ado about nothing " * 9, red)])


def test_likelihood_behind_an_image_names_the_task_that_asks_for_it(asked):
    plain = question("a", task="plain", kind="loglikelihood")
    shown = question("a", {"visual": []}, task="shown", kind="loglikelihood")
    with pytest.raises(ConfigError, match="the task shown compares"):
        asked().loglikelihood([plain, shown])


def test_images_of_all_questions_are_never_in_memory_at_once(asked, given, monkeypatch):
    monkeypatch.setattr("forge_trainer.commands.harness.SORTED", 2)
    model, opened = asked(), []
    read = type(model._model.config).prompt
    monkeypatch.setattr(
        type(model._model.config), "prompt", lambda *a: (opened.append(len(given)), read(*a))[1]
    )
    red = {"visual": Image.new("RGB", (9, 9), "red")}
    model.generate_until([question("<image>" + "a" * count, red) for count in range(10)])
    assert opened == [0] * 4 + [2] * 4 + [4] * 2


SEEN = """
task: seen
dataset_path: parquet
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "<image>{{{{question}}}}"
doc_to_image: ["image"]
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["#"], max_gen_toks: 6}}
metric_list: [{{metric: exact_match}}]
"""


@pytest.mark.slow
def test_tasks_of_the_harness_with_images_are_asked_as_generate_is(forge, seeing, tmp_path):
    forge("train", seeing(steps=12))
    run, files = tmp_path / "runs" / "tiny", [image(colour, tmp_path) for colour in ("red", "blue", "green")]
    rows = [{"prompt": "<image>colour? ", "images": [str(file)]} for file in files] * 2
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("--prompts", tmp_path / "asked.jsonl", "--max-new-tokens", 6, "--temperature", 0)
    written = [json.loads(line)["text"] for line in forge("generate", run, *options).stdout.splitlines()]
    assert len(written) == 6
    (tmp_path / "tasks").mkdir()
    answers = [text if number < 4 else "no such answer" for number, text in enumerate(written)]
    columns = {"question": ["colour? "] * 6, "answer": answers, "image": [str(file) for file in files * 2]}
    data = datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image())
    data.to_parquet(tmp_path / "rows.parquet")
    (tmp_path / "tasks" / "seen.yaml").write_text(SEEN.format(data=tmp_path / "rows.parquet"))
    out = tmp_path / "results.json"
    flags = ("--tasks-from", tmp_path / "tasks", "--json", out, "--batch-size", 4)
    forge("eval", run, "--tasks", "seen", *flags)
    assert json.loads(out.read_text())["seen"]["exact_match,none"] == pytest.approx(4 / 6)
    choice = SEEN.format(data=tmp_path / "rows.parquet").replace("generate_until", "multiple_choice")
    choice = (
        choice.replace("task: seen", 'task: chosen\ndoc_to_choice: ["a", "b"]')
        .replace(
            'generation_kwargs: {until: ["#"], max_gen_toks: 6}\nmetric_list: [{metric: exact_match}]', ""
        )
        .replace('doc_to_target: "{{answer}}"', "doc_to_target: 0")
    )
    (tmp_path / "tasks" / "chosen.yaml").write_text(choice)
    refused = forge("eval", run, "--tasks", "chosen", *flags, check=False)
    assert refused.returncode == 78 and "expected one that has the model write" in refused.stderr


def test_run_that_trains_refuses_tasks_with_images_before_its_first_step(forge, seeing, tmp_path):
    rows = {"question": ["colour? "], "answer": ["red"], "image": [str(image("red", tmp_path))]}
    data = datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image())
    data.to_parquet(tmp_path / "rows.parquet")
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "seen.yaml").write_text(SEEN.format(data=tmp_path / "rows.parquet"))
    path = seeing(steps=3)
    tasks = f'--eval.tasks={{names=["seen"],folder="{tmp_path}/tasks",every_steps=2}}'
    refused = forge("train", path, tasks, check=False)
    assert refused.returncode == 78 and "use forge eval RUN --tasks" in refused.stderr
    assert "step " not in refused.stdout


@pytest.mark.slow
def test_run_of_text_refuses_tasks_with_images(forge, tiny, tmp_path):
    forge("train", tiny(steps=3))
    rows = {"question": ["colour? "], "answer": ["red"], "image": [str(image("red", tmp_path))]}
    data = datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image())
    data.to_parquet(tmp_path / "rows.parquet")
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "seen.yaml").write_text(SEEN.format(data=tmp_path / "rows.parquet"))
    flags = ("--tasks", "seen", "--tasks-from", tmp_path / "tasks")
    refused = forge("eval", tmp_path / "runs" / "tiny", *flags, check=False)
    assert refused.returncode == 78 and "takes neither images nor sounds" in refused.stderr
