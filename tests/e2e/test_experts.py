"""Runs with experts, from training to what is made of their weights."""

import json
import math
import signal

import pytest
import torch
from runs import losses, records

MIXTRAL = """
[model.ffn]
type = "moe"
num_experts = 4
dim = 24
router = { batch_balance_weight = 0.01 }
"""
DEEPSEEK = """
[[model.overrides]]
layers = "0"
ffn = { dim = 64 }

[model.ffn]
type = "moe"
num_experts = 8
top_k = 3
dim = 24
shared_experts = 1
router = { type = "sigmoid", groups = 4, top_groups = 2, scale = 1.5, bias_rate = 0.02 }

[model.mtp]
num_modules = 1
"""
MLA = (
    'attention = { type = "mla", num_heads = 2, kv_rank = 16, q_rank = 24, nope_dim = 8, rope_dim = 8, '
    "value_dim = 8 }"
)
LOAD = {"load_max_over_mean", "load_entropy", "dead_experts", "drop_rate", "balance_loss", "router_z_loss"}
SIGMOID = """
[model.ffn]
type = "moe"
num_experts = 8
top_k = 2
dim = 24
router = { type = "sigmoid", bias_rate = 0.02 }
"""
FAMILIES = {
    "mixtral": ("attention = { num_heads = 2, num_kv_heads = 1 }", MIXTRAL, LOAD, [0, 1]),
    "deepseek_v3": (MLA, DEEPSEEK, LOAD | {"bias_range"}, [1]),
    "glm4_moe": ("attention = { num_heads = 2, num_kv_heads = 1 }", SIGMOID, LOAD | {"bias_range"}, [0, 1]),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")  # transformers, where none are shared
@pytest.mark.parametrize("family", FAMILIES)
def test_run_of_experts_is_logged_evaluated_continued_and_exported(forge, tiny, tmp_path, family):
    attention, extra, names, layers = FAMILIES[family]
    path = tiny(steps=8, extra=extra)
    path.write_text(path.read_text().replace(FAMILIES["mixtral"][0], attention))
    forge("train", path)
    run = tmp_path / "runs" / "tiny"
    last = [record for record in records(run) if "loss" in record][-1]
    for layer in layers:
        found = {
            key.rpartition("/")[2]: value for key, value in last.items() if f"layers.{layer}.ffn/" in key
        }
        assert found.keys() == names
        assert found["load_max_over_mean"] >= 1 >= found["load_entropy"] > 0.3
        assert found["drop_rate"] == 0 <= found["dead_experts"] < 8
        assert math.isfinite(found["balance_loss"]) and found["router_z_loss"] > 0
        assert 0 < found.get("bias_range", 0.02) <= 0.32 + 1e-6

    evaluated = records(run)[-1]["eval/loss"]
    assert f"loss {evaluated:.4f}" in forge("eval", run).stdout
    write = ("generate", run, "--prompt", "import ", "--max-new-tokens", "16", "--temperature", "0")
    plain = forge(*write).stdout
    assert plain.startswith("import ")
    ahead = forge(*write, "--speculative", check=False)
    if family != "deepseek_v3":
        assert ahead.returncode == 78 and "model.mtp" in ahead.stderr
    else:
        assert ahead.stdout == plain

    forge("export", run, tmp_path / "hf", "--shard-bytes", 40_000)
    assert len(list((tmp_path / "hf").glob("model-*.safetensors"))) > 2
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["model_type"] == family
    require_loadable(tmp_path / "hf")
    second = tiny(steps=1, name="second.toml", root=tmp_path / "second", extra=extra)
    second.write_text(second.read_text().replace(FAMILIES["mixtral"][0], attention))
    still = ["--optimizer.lr=1e-30", "--schedule.type=none"]
    still += ["--model.ffn.router.bias_rate=0"] * (family != "mixtral")
    forge("train", second, f'--train.init_from="{tmp_path / "hf"}"', *still)
    started = records(tmp_path / "second" / "tiny")[-1]["eval/loss"]
    assert started == pytest.approx(evaluated, rel=1e-6)
    assert losses(tmp_path / "second" / "tiny")[0] < losses(run)[0]


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(600)
def test_run_of_experts_goes_on_over_other_ranks_and_is_exported(forge, tiny, tmp_path):
    attention, extra, *_ = FAMILIES["deepseek_v3"]

    def written(**where):
        path = tiny(steps=14, extra=extra, **where)
        path.write_text(path.read_text().replace(FAMILIES["mixtral"][0], attention))
        return path

    forge("train", written(name="whole.toml", root=tmp_path / "whole"))
    run, whole, cut = tmp_path / "runs" / "tiny", tmp_path / "whole" / "tiny", written()
    for step, ranks, flags in ((2, 2, ["--mesh.ep=2"]), (5, 2, []), (8, 2, ["--mesh.cp=2", "--mesh.ep=2"])):
        assert forge.stop_at(cut, step, signal.SIGTERM, ranks, *flags)
    forge("train", cut, "--mesh.ep=2", ranks=2)
    assert losses(run) == pytest.approx(losses(whole), rel=1e-5)

    assert f"loss {records(run)[-1]['eval/loss']:.4f}" in forge("eval", run).stdout
    write = ("--prompt", "import ", "--max-new-tokens", "16", "--temperature", "0")
    assert forge("generate", run, *write).stdout == forge("generate", whole, *write).stdout
    forge("export", run, tmp_path / "hf")
    require_loadable(tmp_path / "hf")


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(600)
def test_run_goes_on_from_rings_and_cut_experts_to_one_process_and_back(forge, tiny, tmp_path):
    attention, extra, *_ = FAMILIES["deepseek_v3"]

    def written(**where):
        path = tiny(steps=14, extra=extra, **where)
        path.write_text(path.read_text().replace(FAMILIES["mixtral"][0], attention))
        return path

    forge("train", written(name="whole.toml", root=tmp_path / "whole"))
    run, whole, cut = tmp_path / "runs" / "tiny", tmp_path / "whole" / "tiny", written()
    ring, narrow = '--context_parallel.method="ring"', '--tensor_parallel.experts="cut"'
    for step, ranks, flags in (
        (2, 2, ["--mesh.cp=2", ring]),
        (5, 1, []),
        (8, 4, ["--mesh.tp=2", narrow, "--mesh.ep=2"]),
        (11, 2, ["--mesh.tp=2", narrow]),
    ):
        assert forge.stop_at(cut, step, signal.SIGTERM, ranks, *flags)
    forge("train", cut, "--mesh.cp=2", ring, "--mesh.tp=2", narrow, ranks=4)
    assert losses(run) == pytest.approx(losses(whole), rel=1e-5)
    assert records(run)[-1]["eval/loss"] == pytest.approx(records(whole)[-1]["eval/loss"], rel=1e-5)
    write = ("--prompt", "import ", "--max-new-tokens", "16", "--temperature", "0")
    assert forge("generate", run, *write).stdout == forge("generate", whole, *write).stdout
    forge("export", run, tmp_path / "hf")
    require_loadable(tmp_path / "hf")


def require_loadable(folder) -> None:
    """See that transformers loads what was exported, whole."""
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"]
    assert torch.isfinite(model(torch.arange(9)[None]).logits).all()


@pytest.mark.parametrize("ranks", [1, 2])
def test_tokens_of_each_expert_are_written_whoever_holds_them(forge, tiny, tmp_path, ranks):
    extra = MIXTRAL + '\n[hooks.load]\ntype = "expert-load"\nevery_steps = 2\n'
    flags = ["--mesh.pp=2", "--train.micro_batch=1"] if ranks == 2 else []
    forge("train", tiny(steps=5, extra=extra), *flags, ranks=ranks)
    run = tmp_path / "runs" / "tiny"
    lines = [json.loads(line) for line in (run / "experts.jsonl").read_text().splitlines()]
    assert [line.pop("step") for line in lines] == [2, 4, 5]
    tokens = records(run)[-1]["tokens"] // 5
    logged = {r["step"]: r for r in records(run) if "loss" in r}[5]
    for line in lines:
        assert sorted(line) == ["layers.0.ffn", "layers.1.ffn"]
        assert all(len(counts) == 4 and sum(counts) == 2 * tokens for counts in line.values())
    for layer, counts in lines[-1].items() if ranks == 1 else ():
        (found,) = (v for k, v in logged.items() if k.endswith(f"{layer}/load_max_over_mean"))
        assert found == pytest.approx(max(counts) / (sum(counts) / 4))
