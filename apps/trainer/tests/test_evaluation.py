"""What an evaluation tells, against sums made by hand; which sets can be named."""

import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from forge_config import ConfigError, load
from forge_data.config import DataConfig
from forge_data.loading.loader import MicroBatch, build_set_loader
from forge_data.sources.config import FilesConfig
from forge_model import DecoderConfig, LossConfig, initialize
from forge_model.config import GroupedQueryConfig
from forge_parallel.mesh import Mesh
from forge_parallel.testing import run_ranks
from forge_trainer.config.eval import EvalConfig, losses_of, prefixed
from forge_trainer.hooks.tasks import EvaluateTasks
from forge_trainer.steps.text import TextStep

SOURCES = ("code", "prose", "none of it")


def test_numbers_of_sources_are_those_of_each_source_alone():
    """In float64, with made-up lengths in bytes; of a source without targets nothing is told."""
    config = DecoderConfig(
        vocab_size=19, dim=16, num_layers=1, attention=GroupedQueryConfig(num_heads=2), init_std=0.3
    )
    model = config.build().double()
    initialize(model, 0)
    rows = torch.randint(19, (6, 9), generator=torch.Generator().manual_seed(0))
    labels = rows[:, 1:].clone()
    labels[0, :5] = -100
    source, length = torch.tensor([0, 1, 0, 1, 1, 0]), torch.tensor([3, 9, 8, 30, 7, 5])
    batch = [
        MicroBatch(
            {"tokens": rows[i : i + 2, :-1], "labels": labels[i : i + 2]},
            {"source": source[i : i + 2], "bytes": length[i : i + 2]},
            SOURCES,
        )
        for i in (0, 2, 4)
    ]
    step = TextStep(
        [model], LossConfig(chunk_tokens=3, label_smoothing=0.1).build(), Mesh(torch.device("cpu"))
    )
    found = step.evaluate([batch])
    nats = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), labels.flatten(), reduction="none").view(6, 8)
    for name, mine in {"": source >= 0, "/code": source == 0, "/prose": source == 1}.items():
        total, targets = nats[mine].sum().item(), (labels[mine] >= 0).sum().item()
        assert found[f"loss{name}"] == pytest.approx(total / targets, rel=1e-12)
        assert found[f"perplexity{name}"] == pytest.approx(math.exp(total / targets), rel=1e-12)
        bits = total / math.log(2) / length[mine].sum().item()
        assert found[f"bits_per_byte{name}"] == pytest.approx(bits, rel=1e-12)
    assert not [name for name in found if "none of it" in name]
    nothing = [one.inputs | {"labels": one.inputs["labels"] * 0 - 100} for one in batch]
    told = step.evaluate([[MicroBatch(one, batch[0].statistics, SOURCES) for one in nothing]])
    assert math.isnan(told["loss"]) and not [name for name in told if name.startswith("loss/")]
    ends = [one.statistics | {"bytes": one.statistics["bytes"] * 0} for one in batch]
    told = step.evaluate([[MicroBatch(batch[0].inputs, one, SOURCES) for one in ends]])
    assert told["loss"] > 0 and "bits_per_byte" not in told, "targets that are no text have no bytes"


@pytest.mark.parametrize("documents", [True, False])
def test_answers_are_the_documents_of_which_every_target_is_the_likeliest(documents):
    config = DecoderConfig(
        vocab_size=5, dim=16, num_layers=1, max_tokens=8, attention=GroupedQueryConfig(num_heads=2)
    )
    model = config.build()
    initialize(model, 0)
    rows = torch.randint(5, (6, 9), generator=torch.Generator().manual_seed(1))
    likeliest = model(rows[:, :-1]).argmax(-1)
    wrong = torch.rand(6, 8, generator=torch.Generator().manual_seed(2)) < 0.2
    labels = torch.where(wrong, (likeliest + 1) % 5, likeliest)
    labels[:, ::3] = -100
    labels[2] = -100
    ids = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2]).expand(6, -1)
    extra = {"doc_ids": ids} if documents else {}
    source = torch.tensor([0, 1, 0, 1, 1, 0])
    inputs = {"tokens": rows[:, :-1], "labels": labels} | extra
    if documents:  # the likeliest token was that of rows that see no other document
        likeliest = model(rows[:, :-1], doc_ids=ids).argmax(-1)
    step = TextStep([model], LossConfig(chunk_tokens=3).build(), Mesh(torch.device("cpu")), answers=True)
    found = step.evaluate([[MicroBatch(inputs, {"source": source}, SOURCES)]])
    for name, mine in {"": source >= 0, "/code": source == 0, "/prose": source == 1}.items():
        right, asked, answers, all_right = 0, 0, 0, 0
        for row in mine.nonzero()[:, 0].tolist():
            for document in [(ids[row] == n) for n in range(3)] if documents else [ids[row] >= 0]:
                valid = document & (labels[row] >= 0)
                hit = (labels[row] == likeliest[row])[valid]
                right, asked = right + int(hit.sum()), asked + len(hit)
                answers, all_right = answers + (len(hit) > 0), all_right + (len(hit) > 0 and bool(hit.all()))
        assert found[f"accuracy{name}"] == right / asked
        assert found[f"answers{name}"] == pytest.approx(all_right / answers)
    assert 0 < found["answers"] < found["accuracy"] < 1
    assert not [name for name in found if "none of it" in name]


def test_set_reads_all_text_of_its_sources_once_over_all_ranks(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(9):
        (folder / f"{number}.txt").write_text(f"{number}" * (20 + number))
    source = FilesConfig(paths=[str(folder)], held_out=0.5, name="digits")
    data = DataConfig(max_tokens=8, sources=[source], cache_dir=str(tmp_path / "cache"), validation_samples=1)
    seen, lengths = [], 0
    for rank in range(2):
        loader = build_set_loader(data, [source], 0, rank=rank, world_size=2, micro_batch=3)
        for micro in (micro for batch in loader for micro in batch):
            labels = micro.inputs["labels"]
            seen += labels[labels >= 0].tolist()
            lengths += int(micro.statistics["bytes"].sum())
    text = sum(20 + number for number in range(9))
    assert len(seen) == (text + 9 - 1) // 8 * 8, "whole sequences of all the text"
    assert lengths == sum(token < 256 for token in seen)


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ('[sets.loss]\nsources = [{ type = "python-stdlib" }]', "'loss'"),
        ('[sets."a/b"]\nsources = [{ type = "python-stdlib" }]', "'a/b'"),
        ('[sets.tasks]\nsources = [{ type = "python-stdlib" }]', "'tasks'"),
        ("[tasks]\nnames = []", "at least one task"),
        ("[sets.news]\nsources = []", "at least one"),
        ('[sets.news]\nsources = [{ type = "python-stdlib" }]\nsteps = 3', "steps"),
        ("every_steps = -1", "every_steps"),
    ],
)
def test_section_is_refused(tmp_path, section, said):
    (tmp_path / "eval.toml").write_text(section)
    with pytest.raises(ConfigError, match=said):
        load(EvalConfig, tmp_path / "eval.toml")


def test_losses_of_a_record_are_those_of_sets_and_not_of_sources():
    record = {"step": 3.0} | prefixed("", {"loss": 1.0, "loss/loss": 2.0, "bits_per_byte": 3.0})
    record |= prefixed("news", {"loss": 4.0, "loss/web": 5.0})
    assert losses_of(record) == {"validation": 1.0, "news": 4.0}


def _of_tasks(group=None):
    logged, told = [], []
    first = group is None or dist.get_rank() == 0
    hook = EvaluateTasks(
        3,
        SimpleNamespace(log=logged.append, mesh=SimpleNamespace(control_group=group)),
        lambda: {"choice/acc": 0.5} if first else {},  # as the harness does
        nullcontext,
        lambda progress, results: told.append((progress.step, results)),
    )
    hook.on_step(SimpleNamespace(step=6), None)
    return logged, told


def test_tasks_are_logged_and_told_to_hooks():
    logged, told = _of_tasks()
    assert logged == [{"eval/tasks/choice/acc": 0.5}] and told == [(6, logged[0])]


def _of_tasks_on_ranks():
    return _of_tasks(dist.group.WORLD)


@pytest.mark.dist
def test_all_ranks_are_told_what_tasks_say():
    assert run_ranks(_of_tasks_on_ranks, 2) == [_of_tasks()] * 2
