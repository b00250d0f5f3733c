"""Every file in configs/ loads, alone or as part of a run."""

import math
import re
import resource
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from forge_config import Config, ConfigError, load
from forge_data import cli
from forge_model import config_from_hf
from forge_model.config import ModelConfig
from forge_model.decoder.compare import differences
from forge_parallel.error import ParallelError
from forge_trainer.config.job import Job, load_job
from forge_trainer.plan.devices import load_table
from forge_trainer.plan.report import plan_of
from forge_trainer.slurm.config import load_cluster
from forge_trainer.study.array import layout_of
from forge_trainer.study.config import load_study
from forge_trainer.study.points import points_of
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

ROOT = Path(__file__).parents[2]
PARTS = sorted(
    path
    for kind in ("models", "mesh")
    for path in ROOT.glob(f"configs/{kind}/*.toml")
    if "vision-language" not in path.read_text()  # these are not laid over a model of text; `RUNS` has them
)


@pytest.mark.parametrize("path", PARTS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_part_loads_on_top_of_a_run(path, tmp_path):
    run = tmp_path / "run.toml"
    run.write_text(
        f'extends = ["{ROOT}/configs/runs/debug.toml", "{path}"]\n'
        "[model]\nmax_tokens = 131072\ndim = 128\nnum_layers = 8\ntie_embeddings = false\n"
        "[model.attention]\nnum_heads = 8\n" + ("" if "mla" in path.stem else "num_kv_heads = 4\n")
    )
    assert load_job(run).value


WORLD_SIZES = {
    "auto": [1, 2, 4, 8],
    "hsdp-4gpu-nodes": [8],
    "hsdp-8gpu-nodes": [16],
    "tp4": [4, 8, 256],
    "cp4": [4, 8, 256],
    "pp4-tp4": [16, 256],
}
"""For how many ranks each mesh is meant."""


def test_world_size_of_every_mesh_is_stated():
    assert {path.stem for path in ROOT.glob("configs/mesh/*.toml")} == set(WORLD_SIZES)


@pytest.mark.parametrize(("mesh", "world_size"), [(m, n) for m, sizes in WORLD_SIZES.items() for n in sizes])
def test_mesh_is_laid_out_for_its_world_size(mesh, world_size, tmp_path):
    run = tmp_path / "run.toml"
    run.write_text(
        f'extends = ["{ROOT}/configs/runs/debug.toml", "{ROOT}/configs/mesh/{mesh}.toml"]\n'
        "[train]\nmicro_batch = 2\nglobal_batch = 512\n[model]\nnum_layers = 8\n"
        "[model.attention]\nnum_heads = 4\n"
    )
    job = load_job(run).value
    sizes = job.mesh.sizes(world_size)
    assert math.prod(sizes.values()) == world_size
    assert job.train.global_batch % (job.train.micro_batch * sizes["dp_replicate"] * sizes["dp_shard"]) == 0


RUNS = {
    "debug": (1, 1.354e6),
    "mixture_debug": (1, 1.354e6),
    "moe_debug": (1, 3.940e6),
    "vlm_debug_joint": (1, 0.734e6),
    "vlm_debug_cross": (1, 1.161e6),
    "vlm_debug_mot": (1, 1.161e6),
    "vlm_debug_moma": (1, 2.8e6),
    "llava-7b-stage1": (8, 7.06e9),
    "llava-7b-stage2": (8, 7.06e9),
    "llama-3-v-8b": (64, 10.1e9),
    "smolvlm-256m": (4, 0.2565e9),
    "vlm-7b": (64, 7.72e9),
    "moe_1b_a400m": (16, 1.12e9),
    "mla_moe_16b": (16, 16.5e9),
    "llama-125m": (4, 0.174e9),
    "llama-1b": (16, 1.24e9),
    "llama-8b": (256, 8.03e9),
    "llama-70b": (64, 70.6e9),
}
"""Each run: a number of ranks it is meant for, and its parameters."""
GOES_ON = {"llava-7b-stage2": ['--train.init_from={ encoder = "hf/tower" }']}
"""In place of the run before it, which is not there."""


def test_parameters_of_every_run_are_stated():
    assert {path.stem for path in ROOT.glob("configs/runs/*.toml")} == set(RUNS)


@pytest.mark.parametrize("name", RUNS)
def test_run_loads_and_is_laid_out(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = {"<|end_of_text|>": 0, "a": 1, "</s>": 2, "<|endoftext|>": 3}
    for folder in ("llama3", "vicuna", "smollm2", "mistral"):
        (tmp_path / "data" / folder).mkdir(parents=True)
        Tokenizer(WordLevel(words, unk_token="a")).save(f"data/{folder}/tokenizer.json")
    job = load_job(ROOT / "configs" / "runs" / f"{name}.toml", GOES_ON.get(name, [])).value
    world_size, parameters = RUNS[name]
    sizes = job.mesh.sizes(world_size)
    share = job.train.global_batch // (sizes["dp_replicate"] * sizes["dp_shard"])
    assert share % job.train.micro_batch == 0
    assert share // job.train.micro_batch >= sizes["pp"] * job.pipeline.held() or sizes["pp"] == 1
    with torch.device("meta"):
        model = job.model.build()
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(parameters, rel=0.03)


@pytest.mark.parametrize(
    "name",
    [
        name if "debug" in name or name == "llama-1b" else pytest.param(name, marks=pytest.mark.slow)
        for name in RUNS
    ],
)
def test_run_is_planned_and_fits_without_data_tokenizer_or_gpu(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ranks, parameters = RUNS[name]
    job = load_job(ROOT / "configs" / "runs" / f"{name}.toml", on_paper=True).value
    plan = plan_of(job, ranks, None, "h100", load_table())
    assert plan.parameters.total == pytest.approx(parameters, rel=0.03)
    assert plan.fits
    assert plan.time is not None and math.isfinite(plan.time.likely)
    assert 0 < plan.mfu() < 0.8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks", "flags"),
    [
        ("llama-70b", 1024, []),
        ("mla_moe_16b", 64, ["--mesh.dp_replicate=1", "--mesh.dp_shard=-1", "--mesh.ep=8"]),
    ],
)
def test_large_jobs_are_planned_in_a_minute_and_little_memory(name, ranks, flags):
    job = load_job(ROOT / "configs" / "runs" / f"{name}.toml", flags, on_paper=True).value
    begun = time.process_time()
    plan_of(job, ranks, 8, "h100", load_table())
    assert time.process_time() - begun < 60
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 2 << 20


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/sweeps/*.toml")), ids=lambda path: path.stem)
def test_run_of_a_sweep_loads(path):
    assert load_job(path, ["--optimizer.lr=1e-2"]).value.optimizer.lr == 1e-2


def test_mesh_for_nodes_is_refused_on_other_world_sizes(tmp_path):
    run = tmp_path / "run.toml"
    run.write_text(
        f'extends = ["{ROOT}/configs/runs/debug.toml", "{ROOT}/configs/mesh/hsdp-4gpu-nodes.toml"]\n'
    )
    with pytest.raises(ParallelError, match="product must be 4"):
        load_job(run).value.mesh.sizes(4)


MISTAKES = """
[model]
nun_layers = 3
dim = "wide"
[train]
steps = 0
[optimizer]
type = "adamv"
[schedule]
floor = 2.0
[trane]
x = 1
"""
LOAD = """
import sys
from forge_config import ConfigError
from forge_trainer.config.job import Job, load_job
from forge_trainer.slurm.config import load_cluster
from forge_trainer.study.array import layout_of
from forge_trainer.study.config import load_study
from forge_trainer.study.points import points_of
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
try:
    load_job(sys.argv[1])
except ConfigError as error:
    print(error)
print("torch" in sys.modules)
"""


def test_all_mistakes_are_reported_together_at_their_lines_and_before_torch(tmp_path):
    bad = tmp_path / "bad.toml"
    bad.write_text(f'extends = "{ROOT}/configs/runs/debug.toml"' + MISTAKES)
    done = subprocess.run([sys.executable, "-c", LOAD, str(bad)], capture_output=True, text=True, check=True)
    first, *lines, torch_was_loaded = done.stdout.replace(str(bad), "bad").splitlines()
    assert first == "bad: 6 problems" and torch_was_loaded == "False"
    assert {line.strip() for line in lines} == {
        "bad:3: model.nun_layers: unknown key 'nun_layers'; did you mean 'num_layers'?",
        'bad:4: model.dim: given "wide"; expected integer >= 1',
        "bad:6: train.steps: given 0; expected integer >= 1, <= 1099511627776",
        "bad:8: optimizer.type: unknown optimizer type 'adamv'; did you mean 'adamw'?",
        "bad:10: schedule.floor: given 2.0; expected number >= 0, <= 1",
        "bad:11: trane: unknown key 'trane'; did you mean 'train'?",
    }


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["--mesh.pp=2", "--model.tie_embeddings=true", '--pipeline.schedule="dualpipe_v"'],
            "would hold tied embeddings twice",
        ),
        (["--mesh.pp=2", "--model.tie_embeddings=true", "--model.mtp.num_modules=1"], "tokens ahead"),
        (["--mesh.pp=64"], "64 stages need as many layers"),
        (["--mesh.pp=2", "--pipeline.layers=[1,1]"], "do not add up to"),
        (
            ["--mesh.pp=2", "--pipeline.schedule=zbv_zero_bubble", "--compile.enabled=true"],
            "cannot be done with compile.enabled = true",
        ),
        (
            [
                "--mesh.pp=2",
                "--pipeline.schedule=dualpipe_v",
                "--activation_checkpointing.mode=selective",
            ],
            'cannot be done with activation_checkpointing.mode = "selective"',
        ),
        (
            ["--fp8.gather=true", "--fp8.recipe=tensorwise", "--fsdp.offload=true"],
            "weights are rounded on the GPU",
        ),
        (
            ["--fsdp.offload=true", "--optimizer.type=muon", "--optimizer.scale=match-rms-adamw"],
            "where muon has not been tried",
        ),
        (
            ["--fp8.recipe=tensorwise", "--data.max_tokens=100", "--train.micro_batch=2"],
            "with 200 tokens .* expected a multiple of 16",
        ),
        (
            ["--fp8.recipe=rowwise", "--data.max_tokens=80", "--train.micro_batch=1", "--mesh.cp=2"],
            "with 40 tokens .* expected a multiple of 16",
        ),
        (
            ["--fp8.recipe=mxfp8", "--data.max_tokens=48", "--train.micro_batch=1"],
            "with 48 tokens .* expected a multiple of 32",
        ),
    ],
)
def test_sections_that_do_not_fit_together_are_refused(overrides, said):
    with pytest.raises(ConfigError, match=said):
        load_job(ROOT / "configs" / "runs" / "debug.toml", overrides)


@pytest.mark.parametrize(
    "flags",
    [
        ["--fp8.recipe=tensorwise", "--data.max_tokens=104", "--train.micro_batch=2"],
        ["--fp8.recipe=rowwise_with_gw_hp", "--data.max_tokens=100", "--train.micro_batch=1"],
        ["--fp8.recipe=none", "--data.max_tokens=100", "--train.micro_batch=1"],
    ],
)
def test_eight_bits_are_refused_only_where_weights_get_gradients_in_them(flags):
    load_job(ROOT / "configs" / "runs" / "debug.toml", flags)


@pytest.mark.parametrize(("tokens", "refused"), [(200, True), (208, False)])
def test_torch_refuses_the_products_in_eight_bits_that_we_refuse(tokens, refused):
    """The gradient of a weight: [outputs, tokens] x [tokens, inputs], tensors of a GPU in name."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        gradient = torch.empty(64, tokens, device="cuda:0", dtype=torch.float8_e5m2)
        inputs = torch.empty(64, tokens, device="cuda:0", dtype=torch.float8_e4m3fn).t()
        scale = torch.ones((), device="cuda:0")
        with pytest.raises(RuntimeError, match="divisible by 16") if refused else nullcontext():
            torch._scaled_mm(gradient, inputs, scale, scale, out_dtype=torch.bfloat16)


def test_tensor_parallelism_that_does_not_divide_the_model_is_refused_with_what_would():
    run = ROOT / "configs" / "runs" / "debug.toml"
    with pytest.raises(ConfigError) as refused:
        load_job(run, ["--mesh.tp=4"])
    said = str(refused.value)
    assert "attention.num_heads = 5 is no multiple of 4 (mesh.tp)" in said
    assert "of smaller mesh.tp 1 would divide the model" in said
    with pytest.raises(ConfigError, match=r"num_heads = 5 is no multiple of 2 \(mesh.tp times mesh.cp"):
        load_job(run, ["--mesh.cp=2", "--context_parallel.method=ulysses"])
    with pytest.raises(ConfigError, match=r"max_tokens = 256 is no multiple of 6 \(the parts"):
        load_job(run, ["--mesh.cp=3"])
    assert load_job(run, ["--mesh.tp=5", "--data.max_tokens=250", "--model.ffn.dim=480"]).value.mesh.tp == 5


def test_experts_that_do_not_fit_are_refused():
    run = ROOT / "configs/runs/moe_debug.toml"
    with pytest.raises(ConfigError, match=r"mesh.ep = 3 does not divide .* layer 0 has 8"):
        load_job(run, ["--mesh.ep=3"])
    with pytest.raises(ConfigError, match=r"mesh.ep = 2 shares experts, and no layer of the model has any"):
        load_job(ROOT / "configs/runs/debug.toml", ["--mesh.ep=2"])
    with pytest.raises(
        ConfigError, match=r"layer 0: expert_parallel.chunks = 3 does not divide the 2 experts"
    ):
        load_job(run, ["--mesh.ep=4", "--expert_parallel.chunks=3"])
    cut = ["--tensor_parallel.experts=cut", "--mesh.tp=2", "--model.attention.num_heads=4"]
    assert load_job(run, cut).value.tensor_parallel.experts == "cut"
    with pytest.raises(ConfigError, match=r"layer 0: ffn.dim = 81 .* mesh.tp = 2 ranks; use a multiple, or"):
        load_job(run, [*cut, "--model.ffn.dim=81"])
    with pytest.raises(ConfigError, match=r"layer 0: experts of an expert_choice router"):
        load_job(run, [*cut, "--model.ffn.router.type=expert_choice"])
    with pytest.raises(ConfigError, match=r"this model has no experts that could be"):
        load_job(ROOT / "configs/runs/debug.toml", [*cut, "--model.dim=128", "--model.ffn.dim=512"])
    compiled = ["--compile.enabled=true", "--activation_checkpointing.mode=selective"]
    assert load_job(run, compiled[:1]).value.compile.enabled
    with pytest.raises(ConfigError, match=r"selective. with compile.enabled = true .* layers of experts"):
        load_job(run, compiled)
    groups = ["--model.ffn.router.groups=4", "--model.ffn.router.top_groups=2"]
    two_level = ["--expert_parallel.type=two_level", "--expert_parallel.node_ranks=4"]
    assert load_job(run, ["--mesh.ep=8", *two_level, *groups]).value.expert_parallel.node_ranks == 4
    with pytest.raises(ConfigError, match=r"router.groups = 4 on 8 nodes"):
        load_job(
            run,
            [
                "--mesh.ep=16",
                "--model.ffn.num_experts=16",
                *two_level[:1],
                "--expert_parallel.node_ranks=2",
                *groups,
            ],
        )
    job = load_job(run, ["--mesh.ep=4"]).value
    assert job.mesh.sizes(8)["dp_shard"] == 8
    with pytest.raises(ParallelError, match=r"mesh.ep = 4 does not divide the 2 ranks of dp_shard"):
        job.mesh.sizes(2)


def test_plan_of_data_knows_every_section_of_a_job() -> None:
    """`forge-data` reads the file of a run without forge-trainer."""
    assert set(cli._Job.__struct_fields__) == set(Job.__struct_fields__)


class Whole(Config):
    model: ModelConfig


@pytest.mark.parametrize(
    "name", ["debug", "moe_debug", "llama-1b", "llama-70b", "mla_moe_16b", "moe_1b_a400m"]
)
def test_shipped_decoder_can_be_exported(name, tmp_path):
    run = tmp_path / "run.toml"
    run.write_text(f'extends = ["{ROOT}/configs/models/{name}.toml"]\n')
    model = load(Whole, run).value.model
    keys = model.hugging_face().config()
    assert differences(config_from_hf(keys), model) == []
    families = {"moe_debug": "glm4_moe", "moe_1b_a400m": "dots1", "mla_moe_16b": "deepseek_v3"}
    assert keys["model_type"] == families.get(name, "llama")


STUDIES = {
    "mfu_scaling": 14,
    "config_validation": 7,
    "moe_packing": 3,
    "moe_expert_parallel": 4,
    "profile": 1,
    "ladder": 15,
}
"""Each study, and how many runs it has."""


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/studies/*.toml")), ids=lambda path: path.stem)
def test_study_has_runs_that_can_be_laid_out(path, tmp_path):
    study, root = load_study(path)
    points = points_of(study, path, root)
    assert len(points) == STUDIES[path.stem]
    cluster = load_cluster(ROOT / "configs/clusters/preemptible-4gpu.toml")
    for point in points if path.stem != "ladder" else ():
        nodes, ranks = layout_of(point, cluster, None)
        stated = re.search(r"(?:^|-)(\d+)(?:-|$)", point.name)
        assert path.stem not in ("mfu_scaling", "profile") or nodes * ranks == int(stated[1])
