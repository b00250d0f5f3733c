"""Configurations of KempnerForge and torchtitan, and what becomes of them."""

import re
import tomllib
from pathlib import Path

import pytest
from forge_config import ConfigError, load
from forge_config.registry import type_name
from forge_trainer.cli import main
from forge_trainer.config.checks import checks, vocabulary_covers_the_tokenizer
from forge_trainer.config.job import Job, load_job
from forge_trainer.migrate.command import STACKS

KF = {
    "train": {"batch_size": 2, "seq_len": 1024, "max_steps": 500, "grad_accum_steps": 4},
    "model": {
        "dim": 512,
        "n_layers": 4,
        "n_heads": 8,
        "n_kv_heads": 2,
        "vocab_size": 50304,
        "max_seq_len": 1024,
    },
    "data": {"dataset_path": "tokens", "tokenizer_path": "assets/tokenizer.json"},
    "scheduler": {"warmup_steps": 50},
    "distributed": {"dp_shard": 4},
}


def text(tree):
    from forge_config.toml import dumps

    return dumps(tree)


def merged(base, changes):
    out = {name: dict(table) for name, table in base.items()}
    for name, table in changes.items():
        table = out.setdefault(name, {}) | table
        out[name] = {key: value for key, value in table.items() if value is not None}
    return out


def converted(tmp_path, tree, stack="kempnerforge", *flags):
    source, out = tmp_path / "theirs.toml", tmp_path / "ours.toml"
    source.write_text(text(tree))
    code = main(["convert", str(source), "--from", stack, "--out", str(out), *flags])
    if code:
        assert code == 78 and not out.exists()
        return None
    here = [check for check in checks if check is not vocabulary_covers_the_tokenizer]
    return load(Job, out, (), here).value


def test_sizes_batch_and_schedule_are_what_they_were(tmp_path, capsys):
    job = converted(tmp_path, KF)
    assert (job.model.dim, job.model.num_layers, job.model.attention.num_kv_heads) == (512, 4, 2)
    assert job.model.ffn.dim == 1536, "256 * ceil(4 * 512 * 2 / 3 / 256)"
    assert (job.train.global_batch, job.train.micro_batch, job.train.steps) == (32, 2, 500)
    assert job.data.max_tokens == 1024 and job.job.seed == 42 and job.schedule.warmup_steps == 50
    assert job.schedule.floor == 0.1 and job.optimizer.lr == 3e-4 and job.eval.every_steps == 0
    assert "forge-data import" in capsys.readouterr().err


CASES = {
    "muon": (
        {"optimizer": {"name": "muon", "lr": 0.02, "muon_adam_lr": 1e-3}},
        lambda job: (job.optimizer.adamw_lr, job.optimizer.scale) == (1e-3, "original"),
    ),
    "lion": ({"optimizer": {"name": "lion", "lr": 1e-4}}, lambda job: job.optimizer.lr == 1e-4),
    "schedule-free": (
        {"optimizer": {"name": "schedule_free_adamw", "schedule_free_warmup_steps": 7}},
        lambda job: job.schedule.warmup_steps == 7,
    ),
    "wsd": (
        {"scheduler": {"name": "wsd", "stable_steps": 300, "wsd_decay_type": "linear"}},
        lambda job: (job.schedule.decay_steps, job.schedule.shape) == (150, "linear"),
    ),
    "rex": (
        {"scheduler": {"name": "rex", "min_lr_ratio": 0.0, "warmup_steps": 0}},
        lambda job: job.schedule.factor(250, 500) == 0.5,  # (1 - progress) ** alpha there
    ),
    "no-schedule-has-no-warm-up": (
        {"scheduler": {"name": "none"}},
        lambda job: job.schedule.factor(0, 500) == 1,
    ),
    "tp": ({"distributed": {"tp": 2}}, lambda job: (job.mesh.tp, job.train.global_batch) == (2, 32)),
    "hsdp": ({"distributed": {"dp_replicate": 2}}, lambda job: job.train.global_batch == 64),
    "pp": ({"distributed": {"pp": 2, "pp_schedule": "gpipe"}}, lambda job: job.pipeline.schedule == "gpipe"),
    "gelu": ({"model": {"activation": "gelu"}}, lambda job: job.model.ffn.activation == "gelu"),
    "moe": (
        {"model": {"num_experts": 8, "moe_aux_loss_weight": 0.02}},
        lambda job: (job.model.ffn.num_experts, job.model.ffn.router.batch_balance_weight) == (8, 0.02),
    ),
    "moe-every-second": (
        {"model": {"num_experts": 8, "moe_frequency": 2, "moe_router": "sigmoid_topk"}},
        lambda job: job.model.overrides[0].indices(4) == [1, 3],
    ),
    "experts-on-ranks": (
        {"model": {"num_experts": 8}, "distributed": {"ep": 2}},
        lambda job: (job.mesh.ep, job.mesh.dp_shard) == (2, 8),
    ),
    "fp8": ({"train": {"mixed_precision": "fp8"}}, lambda job: job.fp8.recipe == "tensorwise"),
    "float32": ({"train": {"mixed_precision": "fp32"}}, lambda job: job.precision.compute == "float32"),
    "mixture": (
        {"data": {"datasets": [{"path": "a", "name": "a"}, {"path": "b", "name": "b", "weight": 3.0}]}},
        lambda job: [source.weight for source in job.data.sources] == [1.0, 3.0],
    ),
    "phases": (
        {
            "data": {
                "datasets": [{"path": "a", "name": "a"}, {"path": "b", "name": "b"}],
                "anneal_start_step": 400,
                "anneal_weights": {"a": 0.0, "b": 1.0},
            }
        },
        lambda job: job.data.phases[0].start_step == 400,
    ),
    "hub": (
        {
            "data": {
                "dataset_path": "",
                "hf_dataset_name": "allenai/c4",
                "hf_dataset_config": "en",
                "hf_streaming": True,
            }
        },
        lambda job: (job.data.sources[0].subset, job.data.sources[0].streaming) == ("en", True),
    ),
    "evaluated": (
        {"eval": {"enabled": True, "interval": 100, "dataset_path": "held"}},
        lambda job: job.eval.sets["validation"].samples == 100,
    ),
    "dense-checkpoints": (
        {"checkpoint": {"dyn_ckpt_window": {"start": 0, "stop": 64, "strategy": "power2"}, "keep_last_n": 5}},
        lambda job: (job.checkpoint.dense[0].to_step, job.checkpoint.keep) == (64, 5),
    ),
    "muon-without-nesterov": (
        {"optimizer": {"name": "muon", "lr": 0.02}},
        lambda job: job.optimizer.nesterov is False,
    ),
    "decay-of-zero-steps": (
        {"scheduler": {"decay_steps": 0}},
        lambda job: job.schedule.factor(499, 500, 1) < 0.11,
    ),
    "wsd-of-both-lengths": (
        {"scheduler": {"name": "wsd", "stable_steps": 300, "decay_steps": 150}},
        lambda job: job.schedule.decay_steps == 150,
    ),
    "global-batch-with-experts-on-ranks": (
        {"model": {"num_experts": 8}, "distributed": {"ep": 8}},
        lambda job: (job.train.global_batch, job.train.micro_batch, job.mesh.dp_shard) == (32, 1, 32),
    ),
    "one-shared-expert": (
        {"model": {"num_experts": 8, "moe_shared_experts": 3}},
        lambda job: job.model.ffn.shared_experts == 1,
    ),
    "sequence-loss-of-sigmoid": (
        {"model": {"num_experts": 8, "moe_router": "sigmoid_topk", "moe_sequence_aux_loss_weight": 0.1}},
        lambda job: (
            job.model.ffn.router.sequence_balance_weight == 0
            and job.model.ffn.router.batch_balance_weight == pytest.approx(0.01 * 0.1)
        ),
    ),
    "no-sequence-loss-of-softmax": (
        {"model": {"num_experts": 8, "moe_sequence_aux_loss_weight": 0.1}},
        lambda job: job.model.ffn.router.sequence_balance_weight == 0,
    ),
    "phase-that-names-one-of-three": (
        {
            "data": {
                "datasets": [
                    {"path": "/a", "name": "a", "weight": 4.0},
                    {"path": "/b", "weight": 16.0},
                    {"path": "/c", "name": "c"},
                ],
                "mix_temperature": 2.0,
                "phases": [{"start_step": 100, "dataset_weights": {"a": 9.0}, "lr_scale": 0.5}],
            }
        },
        lambda job: job.data.phases[0].weights == {"a": 3.0, "1": 4.0, "c": 1.0},
    ),
    "phase-that-names-a-path": (
        {
            "data": {
                "datasets": [{"path": "/a"}, {"path": "/b"}],
                "anneal_start_step": 100,
                "anneal_weights": {"/b": 3.0},
            }
        },
        lambda job: job.data.phases[0].weights == {"0": 1.0, "1": 3.0},
    ),
    "nothing-is-held-out": (
        {"data": {"dataset_path": "", "hf_dataset_name": "allenai/c4"}},
        lambda job: job.data.sources[0].held_out == 0,
    ),
    "tokens-before-the-hub": (
        {"data": {"dataset_path": "/tokens", "hf_dataset_name": "allenai/c4"}},
        lambda job: job.data.sources[0].path == "/tokens",
    ),
    "key-and-value-heads-of-the-default": (
        {"model": {"dim": 1024, "n_heads": 64, "n_kv_heads": None}},
        lambda job: job.model.attention.num_kv_heads == 32,
    ),
    "all-checkpoints": (
        {"checkpoint": {"keep_last_n": 0, "interval": 50}},
        lambda job: job.checkpoint.keep_every_steps == 50,
    ),
    "checkpoints-behind-a-step": (
        {"checkpoint": {"dyn_ckpt_window": {"start": 10, "stop": 20}}},
        lambda job: (
            [step for step in range(1, 40) if job.checkpoint.is_dense(step)] == [10, 11, 12, 14, 18]
            and not job.checkpoint.keep_initial
        ),
    ),
    "first-checkpoint": (
        {"checkpoint": {"dyn_ckpt_window": {"start": 0, "stop": 20}}},
        lambda job: [step for step in range(40) if job.checkpoint.is_dense(step)] == [0, 1, 2, 4, 8, 16],
    ),
    "profiled": (
        {"profiling": {"enable": True, "start_step": 4, "end_step": 9}},
        lambda job: (job.hooks["profile"].first_step, job.hooks["profile"].steps) == (4, 5),
    ),
    "wandb": (
        {"metrics": {"enable_wandb": True, "wandb_project": "p"}},
        lambda job: job.track.wandb.project == "p",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_configuration_of_kempnerforge_becomes_one_of_ours(tmp_path, case):
    changes, holds = CASES[case]
    assert holds(converted(tmp_path, merged(KF, changes)))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"vlm": {"arch": "joint_decoder"}, "vision_encoder": {"type": "clip"}},
            "[vlm] has another structure here",
        ),
        ({"distributed": {"dp_shard": -1}}, "give --ranks"),
        ({"train": {"mixed_precision": "fp16"}}, "bfloat16 or float32"),
        ({"data": {"dataset_path": ""}}, "no data is configured"),
        ({"scheduler": {"decay_steps": 100}}, "a decay ends with the run"),
        ({"train": {"max_stepz": 3}}, "train.max_stepz (did you mean 'train.max_steps'?)"),
        ({"model": {"n_kv_heads": 3}}, "model.attention"),
        ({"optimizer": {"name": "sgd"}}, "optimizer.name = 'sgd' has no counterpart; known: adamw"),
        ({"optimizer": {"name": ["adamw"]}}, "optimizer.name = ['adamw'] has no counterpart"),
        ({"model": {"dim": "512"}}, "expected numbers, given model.dim = '512'"),
        ({"train": {"mixed_precision": "int8"}}, "train.mixed_precision = 'int8' has no counterpart"),
        ({"model": {"num_experts": 8, "moe_router": "hash"}}, "model.moe_router = 'hash' has no counterpart"),
        (
            {"model": {"num_experts": 8, "moe_router": "sigmoid_topk", "moe_bias_schedule": "x"}},
            "model.moe_bias_schedule = 'x' has no counterpart",
        ),
        (
            {"scheduler": {"name": "wsd", "wsd_decay_type": "exp"}},
            "scheduler.wsd_decay_type = 'exp' has no counterpart",
        ),
        (
            {"scheduler": {"name": "wsd", "stable_steps": 100, "decay_steps": 100}},
            "are 200 steps, and 450 come behind the warm-up",
        ),
        ({"scheduler": {"name": "wsd", "decay_steps": 100}}, "stable_steps = 0 and decay_steps = 100"),
        (
            {"scheduler": {"name": "wsd", "wsd_decay_type": "sqrt"}},
            "wsd_decay_type = 'sqrt' has no counterpart",
        ),
        ({"scheduler": {"name": "rex"}}, "scheduler.name = 'rex' is max(0.1, (1 - progress) ** 1.0) there"),
        (
            {"scheduler": {"name": "rex", "rex_alpha": 2.0, "min_lr_ratio": 0.0}},
            "scheduler.name = 'rex' is max(0.0, (1 - progress) ** 2.0) there",
        ),
        (
            {"model": {"num_experts": 8}, "train": {"batch_size": 3}, "distributed": {"ep": 8}},
            "read the same 12 sequences",
        ),
        (
            {
                "data": {
                    "datasets": [{"path": "a", "name": "a"}],
                    "anneal_start_step": 9,
                    "anneal_weights": {"b": 1.0},
                }
            },
            "phases weigh b; the data sets are a",
        ),
        ({"data": {"mix_temperature": 0}}, "data.mix_temperature = 0"),
        ({"data": {"dataset_path": "", "hf_dataset_name": "a/b", "tokenizer_path": None}}, "no tokenizer"),
    ],
)
def test_what_cannot_be_converted_is_said_and_nothing_is_written(tmp_path, capsys, changes, said):
    assert converted(tmp_path, merged(KF, changes)) is None
    assert said in capsys.readouterr().err


def test_automatic_sharding_takes_the_ranks_that_are_given(tmp_path):
    automatic = merged(KF, {"distributed": {"dp_shard": -1, "tp": 2}})
    assert converted(tmp_path, automatic, "kempnerforge", "--ranks=16").train.global_batch == 64


def test_configuration_of_torchtitan_becomes_one_of_ours(tmp_path, capsys):
    theirs = {
        "job": {"dump_folder": "out"},
        "model": {
            "name": "llama3",
            "flavor": "8B",
            "hf_assets_path": "assets/llama",
            "converters": ["float8"],
        },
        "optimizer": {"name": "AdamW", "lr": 3e-4, "eps": 1e-8},
        "lr_scheduler": {
            "warmup_steps": 20,
            "decay_ratio": 0.8,
            "decay_type": "linear",
            "min_lr_factor": 0.1,
        },
        "training": {"local_batch_size": 1, "seq_len": 4096, "steps": 100, "dataset": "c4"},
        "parallelism": {"data_parallel_shard_degree": -1, "tensor_parallel_degree": 2},
        "activation_checkpoint": {"mode": "selective", "selective_ac_option": "2"},
        "float8": {"recipe_name": "rowwise"},
        "profiling": {"enable_profiling": True, "profile_freq": 20},
    }
    job = converted(tmp_path, theirs, "torchtitan", "--ranks=8")
    assert (job.model.dim, job.mesh.tp, job.train.global_batch) == (4096, 2, 4)
    assert (job.schedule.decay_fraction, job.schedule.floor) == (0.8, 0.1)
    assert (job.activation_checkpointing.mode, job.activation_checkpointing.every) == ("every", 2)
    assert job.hooks["profile"].every_steps == 20
    assert job.fp8.recipe == "rowwise" and job.optimizer.betas == (0.9, 0.95)
    theirs["model"]["flavor"] = "debugmodel"
    (tmp_path / "ours.toml").unlink()
    assert converted(tmp_path, theirs, "torchtitan", "--ranks=8") is None
    assert "sizes are in their code" in capsys.readouterr().err


TITAN = {
    "model": {"name": "llama3", "flavor": "8B", "hf_assets_path": "assets"},
    "training": {"local_batch_size": 8, "seq_len": 4096, "dataset": "c4"},
}

TITAN_CASES = {
    "blocks-by-default": (
        {},
        lambda job: (job.activation_checkpointing.mode, job.activation_checkpointing.every) == ("every", 2),
    ),
    "no-blocks": (
        {"activation_checkpoint": {"mode": "none", "selective_ac_option": "2"}},
        lambda job: job.activation_checkpointing.mode == "none",
    ),
    "all-blocks": (
        {"activation_checkpoint": {"mode": "full", "selective_ac_option": "2"}},
        lambda job: job.activation_checkpointing.mode == "full",
    ),
    "operations": (
        {"activation_checkpoint": {"selective_ac_option": "op"}},
        lambda job: job.activation_checkpointing.mode == "selective",
    ),
    "pipeline": (
        {"parallelism": {"pipeline_parallel_degree": 4}},
        lambda job: (job.train.micro_batch, job.train.global_batch) == (1, 16),
    ),
    "pipeline-of-two": (
        {"parallelism": {"pipeline_parallel_degree": 4, "pipeline_parallel_microbatch_size": 2}},
        lambda job: (job.train.micro_batch, job.train.global_batch) == (2, 16),
    ),
    "all-checkpoints": (
        {"checkpoint": {"keep_latest_k": 0, "interval": 250}},
        lambda job: job.checkpoint.keep_every_steps == 250,
    ),
    "distance-of-checkpoints": (
        {},
        lambda job: (job.checkpoint.every_steps, job.checkpoint.keep) == (500, 10),
    ),
    "nothing-is-held-out": ({}, lambda job: job.data.sources[0].held_out == 0),
    "converters-of-older-files": (
        {"model": {"converters": "float8"}},
        lambda job: job.fp8.recipe == "tensorwise",
    ),
    "tokenizer-of-older-files": (
        {"model": {"hf_assets_path": None, "tokenizer_path": "assets/tokenizer.model"}},
        lambda job: job.data.tokenizer.path == "assets/tokenizer.json",
    ),
    "keys-that-are-left-out": (
        {"checkpoint": {"exclude_from_loading": ["lr_scheduler"]}, "memory_estimation": {"enabled": True}},
        lambda job: job.train.global_batch == 64,
    ),
}


@pytest.mark.parametrize("case", TITAN_CASES)
def test_configuration_of_torchtitan_keeps_its_values(tmp_path, case):
    changes, holds = TITAN_CASES[case]
    assert holds(converted(tmp_path, merged(TITAN, changes), "torchtitan", "--ranks=8"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"parallelism": {"tensor_parallel_degree": 3}}, "8 ranks are no multiple of"),
        ({"model": {"converters": ["mx"]}}, "model.converters has mx"),
        ({"model": {"hf_assets_path": None}}, "no tokenizer is named"),
        ({"validation": {"enable": True}}, "'c4_validation' is a name of their code"),
        ({"lr_scheduler": {"decay_type": "exp"}}, "lr_scheduler.decay_type = 'exp' has no counterpart"),
        ({"activation_checkpoint": {"selective_ac_option": "x"}}, "known: op, numbers"),
        ({"training": {"local_batch_size": "8"}}, "expected numbers, given training.local_batch_size"),
    ],
)
def test_what_cannot_be_converted_of_torchtitan_is_said(tmp_path, capsys, changes, said):
    assert converted(tmp_path, merged(TITAN, changes), "torchtitan", "--ranks=8") is None
    assert said in capsys.readouterr().err


def test_file_that_exists_is_not_overwritten(tmp_path, capsys):
    assert converted(tmp_path, KF)
    source = tmp_path / "theirs.toml"
    assert (
        main(["convert", str(source), "--from", "kempnerforge", "--out", str(tmp_path / "ours.toml")]) == 78
    )
    assert "cannot be written" in capsys.readouterr().err
    assert tomllib.loads((tmp_path / "ours.toml").read_text())["train"]["steps"] == 500


@pytest.mark.parametrize("stack", STACKS)
def test_every_key_moves_to_a_key_that_exists_here(stack):
    from forge_config import schema
    from forge_trainer.migrate.convert import Move

    known = str(schema(Job))
    for rule in STACKS[stack].keys.values():
        if isinstance(rule, Move):
            assert f"'{rule.to.rpartition('.')[2]}'" in known, rule


@pytest.mark.parametrize(
    ("flag", "here"),
    [
        ("--model.n_heads=4", "here it is model.attention.num_heads"),
        ("--train.batch_size=4", "here it is train.micro_batch"),
        ("--train.max_steps=4", "here it is train.steps"),
        ("--distributed.tp=2", "here it is [mesh]"),
        ("--train.stepz=2", "did you mean 'steps'?"),
    ],
)
def test_unknown_keys_of_other_stacks_are_translated(flag, here):
    with pytest.raises(ConfigError, match=here.replace("[", r"\[").replace("?", r"\?")):
        load_job("configs/runs/debug.toml", [flag])


def test_docs_page_has_the_tables_of_keys():
    from forge_trainer.migrate.command import keys_markdown

    page = Path("docs/migrate.md").read_text()
    shown = page.partition("<!-- keys: begin -->\n")[2].partition("<!-- keys: end -->")[0]
    assert shown == keys_markdown(), "write forge_trainer.migrate.command.keys_markdown() between the marks"


def test_names_of_megatron_and_litgpt_are_keys_of_ours():
    page = Path("docs/migrate.md").read_text().partition("| Megatron-LM | litgpt | here |\n")[2]
    keys = [
        key
        for row in page.splitlines()[1:]
        for key in re.findall(r"`([a-z_]+\.[a-z_.]+)`", row.split("|")[3])
    ]
    assert len(keys) > 25
    flags = [f"--{key}={{}}" for key in keys if not key.endswith(".type") and key != "data.sources"]
    with pytest.raises(ConfigError) as found:
        load_job("configs/runs/moe_debug.toml", ["--data.tokenizer.type=hf", *flags])
    assert "unknown key" not in str(found.value)


DECISIONS = {
    "sizes": ["--model.dim=64", "--model.num_layers=2", "--model.vocab_size=260", "--model.max_tokens=4096"],
    "attention": ["--model.attention.num_heads=4"],
    "data": ['--data.sources=[{type="python-stdlib"}]'],
    "tokenizer": ["--data.tokenizer.type=bytes"],
}


def test_what_a_person_decides_on_the_command_line_is_no_problem_any_more(tmp_path, capsys):
    flags = ["--ranks", "8", *(flag for flags in DECISIONS.values() for flag in flags)]
    tree = {"model": {"flavor": "debugmodel", "hf_assets_path": "theirs"}, "training": {"dataset": "c4_test"}}
    assert converted(tmp_path, merged(TITAN, tree), "torchtitan", *flags[:-2]) is None
    said = capsys.readouterr().err
    assert "dataset = 'c4_test' is a name of their code; decide it on this command line" in said
    assert "sizes are in their code" not in said
    job = converted(tmp_path, merged(TITAN, tree), "torchtitan", *flags)
    assert (job.model.dim, job.model.attention.num_heads) == (64, 4)
    assert type_name(type(job.data.tokenizer)) == "bytes", "the path of their tokenizer went with its type"
    assert type_name(type(job.data.sources[0])) == "python-stdlib"


@pytest.mark.parametrize("command", [["train"], ["plan"], ["convert", "--from", "other"]])
@pytest.mark.parametrize(("stack", "tree"), [("kempnerforge", KF), ("torchtitan", TITAN)])
def test_file_of_another_stack_is_recognized(tmp_path, capsys, command, stack, tree):
    path = tmp_path / "theirs.toml"
    path.write_text(text(tree))
    [other] = STACKS.keys() - {stack}
    assert main([*(other if word == "other" else word for word in command), str(path)]) == 78
    last = capsys.readouterr().err.splitlines()[-1]
    assert (
        last == f"This is a file of {STACKS[stack].name}: forge convert --from {stack} {path} --out OURS.toml"
    )


def test_wrong_file_of_ours_is_not_taken_for_one_of_another_stack(tmp_path, capsys):
    path = tmp_path / "ours.toml"
    path.write_text("[model]\ndim = 64\nn_layers = 2\n[optimizer]\nlr = -1\n[train]\nmax_steps = 3\n")
    assert main(["train", str(path)]) == 78
    assert main(["train", str(tmp_path / "none.toml")]) == 78
    assert "This is a file of" not in capsys.readouterr().err


def test_data_that_a_person_names_is_what_kempnerforge_lacked(tmp_path):
    tree = merged(KF, {"data": {"dataset_path": None}})
    assert converted(tmp_path, tree) is None
    assert converted(tmp_path, tree, "kempnerforge", *DECISIONS["data"], "--data.tokenizer.type=bytes")


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--model.dimm=3", "did you mean 'dim'?"),
        ("model.dim=3", "two dashes are missing"),
        ("--x=[", "not valid TOML"),
    ],
)
def test_wrong_decisions_are_refused(tmp_path, capsys, flag, said):
    assert converted(tmp_path, KF, "kempnerforge", flag) is None
    assert said in capsys.readouterr().err
