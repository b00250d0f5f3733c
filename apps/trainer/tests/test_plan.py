"""`forge plan`: what it prints, what it refuses, and that nothing of it is left behind."""

import json
import random
from pathlib import Path

import pytest
import torch
from forge_config import ConfigError
from forge_trainer.cli import main
from forge_trainer.config.job import load_job
from forge_trainer.plan import kinds
from forge_trainer.plan.collectives import Collective, Traffic
from forge_trainer.plan.depth import _period
from forge_trainer.plan.devices import load_table
from forge_trainer.plan.estimate import bubble_share, collective_s, seconds
from forge_trainer.plan.places import Places, shortened
from forge_trainer.plan.report import plan_of
from forge_trainer.plan.search import _around, _changed, search
from forge_trainer.plan.sources import tokens_by_source
from forge_trainer.plan.stage import stage_on_paper
from forge_trainer.plan.trace import Site
from forge_trainer.plan.watch import Watch
from msgspec import structs
from torch._subclasses.fake_tensor import FakeTensorMode

DEBUG = "configs/runs/debug.toml"
SMALL = ["--data.max_tokens=64", "--model.dim=64", "--model.attention.num_heads=4", "--train.micro_batch=2"]


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    import contextlib
    import io

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(["plan", DEBUG, *SMALL, "--ranks=2", "--device=h100", "--json"]) == 0
    return json.loads(out.getvalue())


def test_plan_in_json_adds_up(printed):
    assert printed["ranks"] == 2 and printed["layout"]["dp_shard"] == 2 and printed["fits"] is True
    (stage,) = printed["stages"]
    assert printed["memory_bytes"] == stage["peak"]["total"] == sum(stage["peak"]["bytes"].values())
    assert sum(printed["parameters"]["by_role"].values()) == printed["parameters"]["total"]
    # float32 weights and two moments, of which each rank has half
    assert stage["peak"]["bytes"]["weights"] == pytest.approx(2 * printed["parameters"]["total"], rel=0.02)
    assert stage["peak"]["bytes"]["moments"] == pytest.approx(4 * printed["parameters"]["total"], rel=0.05)
    assert {said["axis"] for said in stage["collectives"]} == {"fsdp"}
    low, likely, high = (printed["time"][name] for name in ("low", "likely", "high"))
    assert 0 < low <= likely <= high


def test_nothing_is_left_of_a_plan():
    job = load_job(DEBUG, SMALL).value
    random.seed(7)
    torch.manual_seed(7)
    expected = (random.random(), torch.rand(3).tolist())
    random.seed(7)
    torch.manual_seed(7)
    attention = torch.nn.functional.scaled_dot_product_attention
    resize = torch.UntypedStorage.resize_
    stage_on_paper(job, Site(4, 8, on_gpu=True))
    assert not torch.distributed.is_initialized()
    assert (random.random(), torch.rand(3).tolist()) == expected
    assert torch.nn.functional.scaled_dot_product_attention is attention
    assert torch.UntypedStorage.resize_ is resize
    assert not isinstance(torch.empty(1), torch._subclasses.fake_tensor.FakeTensor)


def test_few_blocks_and_micro_batches_tell_what_all_would():
    flags = ["--model.num_layers=9", "--train.global_batch=16", "--activation_checkpointing.mode=full"]
    job = load_job(DEBUG, [*SMALL, *flags]).value
    few, whole = (stage_on_paper(job, Site(2, 8, on_gpu=False), whole=one) for one in (False, True))
    assert few.ran < few.blocks == whole.ran == 9
    peaks = [sum(kinds.highest(one.step.peaks)[1].values()) for one in (few, whole)]
    assert peaks[0] == pytest.approx(peaks[1], rel=1e-3)
    assert few.step.flops == whole.step.flops
    assert few.step.collectives == whole.step.collectives


def test_every_schedule_of_a_pipeline_is_planned():
    flags = [*SMALL, "--mesh.pp=2", "--model.tie_embeddings=false", "--model.num_layers=4"]
    for schedule in ("zbv_zero_bubble", "dualpipe_v"):  # their last stage is on the first rank
        job = load_job(DEBUG, [*flags, f"--pipeline.schedule={schedule}"]).value
        plan = plan_of(job, 2, None, "h100", load_table())
        assert [stage.number for stage in plan.stages] == [0, 1]
        assert [peak[1]["logits"] > 0 for peak in plan.peaks] == [True, False]


@pytest.mark.slow
def test_activations_on_the_host_are_not_computed_again():
    job, stages = load_job(DEBUG, SMALL).value, {}
    for mode in ("none", "full", "offload"):
        config = structs.replace(job.activation_checkpointing, mode=mode)
        with_mode = structs.replace(job, activation_checkpointing=config)
        stages[mode] = stage_on_paper(with_mode, Site(1, 8)).step
    assert stages["offload"].flops == stages["none"].flops != stages["full"].flops
    assert stages["offload"].peaks == stages["full"].peaks


def test_questions_about_tensors_move_nothing():
    watch = Watch(Places())
    with FakeTensorMode(), watch:
        a = torch.ones(8)
        watch.start()
        assert a.device.type == "cpu" and a.view(2, 4).flatten().dtype is torch.float32
        assert (watch.kernels, watch.moved) == ({}, {})
        b = a + a
        assert dict(watch.kernels) == {"": 1} and dict(watch.moved) == {("", "forward"): 96.0}
        b.copy_(a)  # reads one and writes one
        assert watch.moved["", "forward"] == 96 + 64


def test_tokenizer_and_weights_are_not_looked_for(tmp_path, monkeypatch, capsys):
    flags = ['--data.tokenizer={ type = "hf", path = "nowhere/tokenizer.json" }', "--train.init_from=nowhere"]
    assert main(["train", DEBUG, *flags, f"--job.root={tmp_path}"]) == 78
    assert main(["plan", DEBUG, *SMALL, *flags, "--device=cpu"]) == 0
    assert "begins with the weights of" in capsys.readouterr().out


def test_job_that_does_not_fit_is_refused_only_when_strict(tmp_path, capsys):
    table = tmp_path / "devices.toml"
    table.write_text(
        "[devices.tiny]\nmemory_gib = 0.001\ntflops = { bfloat16 = 1.0, float32 = 1.0 }\nmemory_gbs = 10.0\n"
        "inside_gbs = 1.0\nbetween_gbs = 1.0\nwatts = 10.0\n"
    )
    line = ["plan", DEBUG, *SMALL, "--device=tiny", f"--device-table={table}"]
    assert main(line) == 0
    assert "DOES NOT FIT" in capsys.readouterr().out
    assert main([*line, "--strict"]) == 78


def test_dry_run_of_a_launch_says_what_the_job_needs(capsys):
    line = ["launch", DEBUG, *SMALL, "--cluster=configs/clusters/generic.toml", "--dry-run"]
    assert main(line) == 0
    assert capsys.readouterr().err == ""
    assert main([*line, "--device=h999"]) == 78
    assert "expected one of h100" in capsys.readouterr().err
    assert main([*line, "--device=h100"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("#!") and "of 77.7 GiB a rank of h100" in said.err and "tokens/s" in said.err


def test_strict_launch_of_a_job_that_does_not_fit_is_refused(tmp_path, monkeypatch, capsys):
    (tmp_path / "devices.toml").write_text("[devices.h100]\nmemory_gib = 0.001\n")
    (tmp_path / "cluster.toml").write_text('[cluster]\ngpus_per_node = 2\ndevice = "h100"\n')
    monkeypatch.setenv("FORGE_DEVICE_TABLE", str(tmp_path / "devices.toml"))
    line = ["launch", DEBUG, *SMALL, f"--cluster={tmp_path / 'cluster.toml'}", "--dry-run"]
    assert main(line) == 0
    said = capsys.readouterr()
    assert "the job does not fit as planned" in said.err and "--strict" not in said.out
    assert main([*line, "--strict"]) == 78
    said = capsys.readouterr()
    assert (
        "without --strict it would be submitted" in said.err
        and "train configs/runs/debug.toml --strict" in said.out
    )


def test_search_finds_what_fits_and_the_change_that_makes_it_fit(tmp_path):
    flags = [*SMALL, "--model.num_layers=2", "--train.global_batch=4", "--data.max_tokens=256"]
    job = load_job(DEBUG, flags).value
    whole, full = (
        plan_of(_changed(job, keys), 1, None, "h100", load_table())
        for keys in ({}, {"activation_checkpointing.mode": "full"})
    )
    assert full.memory_bytes < whole.memory_bytes
    between = (full.memory_bytes + whole.memory_bytes) / 2 / (1 << 30)
    table = tmp_path / "devices.toml"
    table.write_text(f"[devices.h100]\nmemory_gib = {between}\n")
    plan = plan_of(job, 1, None, "h100", load_table(table))
    assert plan.fits is False
    found = search(plan, load_table(table))
    assert {"activation_checkpointing.mode": "full"} in [one.keys for one in found.changes]
    assert found.best and all(one.plan.fits for one in (*found.best, *found.changes))
    times = [one.plan.time.likely for one in found.best]
    assert times == sorted(times)
    assert any("saves" in line for line in found.lines())


def test_search_looks_at_every_axis_what_differs_least_first_and_ends_in_time():
    flags = [*SMALL, "--train.global_batch=64", "--model.num_layers=8", "--model.tie_embeddings=false"]
    job = load_job("configs/runs/moe_debug.toml", flags).value
    layouts = _around(job, 8, 4)
    changed = [{key for key in keys if key.startswith("mesh.")} - {"mesh.dp_shard"} for keys in layouts]
    every = {"mesh.tp", "mesh.pp", "mesh.cp", "mesh.ep", "mesh.dp_replicate"}
    assert set().union(*changed) == every
    assert layouts[0] == {"train.micro_batch": 2} and len(changed[-1]) == 2
    assert {"mesh.pp": 2, "mesh.dp_shard": -1, "train.micro_batch": 2} in layouts
    for keys in layouts:
        _changed(job, keys).require_layout(8)
    plan = plan_of(job, 8, 4, "h100", load_table())
    found = search(plan, load_table(), limit_s=0)
    assert (found.tried, found.left) == (0, len(layouts))
    assert "0 other jobs planned; time was up before" in next(found.lines())


def test_layouts_of_a_world_that_is_no_power_of_two_divide_it():
    found = _around(load_job(DEBUG, [*SMALL, "--train.global_batch=12"]).value, 6, 8)
    assert {keys.get("mesh.pp", 1) for keys in found} == {1, 2, 3}
    assert {keys.get("mesh.tp", 1) for keys in found} == {1, 2}  # three ranks cannot share its heads


@pytest.mark.slow
def test_search_knows_the_recomputation_of_the_job_and_prints_flags():
    flags = [*SMALL, "--train.global_batch=4", "--activation_checkpointing={ mode = 'every', every = 2 }"]
    job, table = load_job(DEBUG, flags).value, load_table()
    asked = plan_of(job, 2, None, "h100", table)
    little = structs.replace(asked.device, memory_gib=asked.memory_bytes / (1 << 30))
    table.devices["h100"] = little
    found = search(asked._replace(device=little), table)
    assert {} in [one.keys for one in found.best]
    said = [line for line in found.lines() if "B  --" in line]
    assert len(said) >= len(found.best) - 1 > 0
    for one in found.best[:2]:
        pasted = one.line().split("B  ")[1].split() if one.keys else []
        alone = plan_of(load_job(DEBUG, [*flags, *pasted]).value, 2, None, "h100", table)
        assert alone.fits and alone.memory_bytes == one.plan.memory_bytes and alone.time == one.plan.time


@pytest.mark.parametrize(
    ("flags", "keys"),
    [
        (["--optimizer.type=muon", "--optimizer.scale=spectral"], {"fsdp.offload": True}),
        (["--step.noise_scale_every_steps=1", "--model.tie_embeddings=false"], {"mesh.pp": 2}),
        (["--hooks={ seen = { type = 'record' } }"], {"mesh.tp": 2}),
        (['--optimizer={ type = "adamw", lr = 1e-3, rounding = "stochastic" }', "--precision.pure_bf16=true"],
         {"precision.pure_bf16": False}),
    ],
)  # fmt: skip
def test_search_proposes_no_job_that_could_not_be_loaded(flags, keys):
    said = [f"--{key}={str(value).lower()}" for key, value in keys.items()]
    with pytest.raises(ConfigError):
        load_job(DEBUG, [*SMALL, *flags, *said])
    job = load_job(DEBUG, [*SMALL, *flags]).value
    with pytest.raises(ValueError):
        _changed(job, keys)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--device=h999"], "expected one of h100"),
        (["--ranks=2", "--nodes=1"], "say one of them"),
        (["--device=cpu", "--search"], "is not known; give --device"),
        (["--ranks=3"], "3 ranks"),
        (["--device-table=nowhere.toml"], "cannot be read"),
    ],
)
def test_bad_flags_are_refused_with_what_to_do(flags, said, capsys):
    assert main(["plan", DEBUG, *flags]) == 78
    assert said in capsys.readouterr().err


def test_table_of_devices_with_an_unknown_key_is_refused(tmp_path):
    table = tmp_path / "devices.toml"
    table.write_text("[devices.h100]\nmemory = 3\n")
    with pytest.raises(ConfigError, match="unknown field"):
        load_table(table)
    table.write_text("[devices.h100]\nmemory_gib = 3.0\n")
    found = load_table(table).devices["h100"]
    assert (found.memory_gib, found.tflops["bfloat16"]) == (3.0, 989.0)


@pytest.mark.parametrize(
    ("kinds_", "expected"),
    [
        ("aaaa", (0, 1, 4)),
        ("abbbb", (1, 1, 4)),
        ("bbbba", (0, 1, 4)),
        ("aabaabaab", (0, 3, 3)),
        ("abcd", (0, 1, 0)),
    ],
)
def test_blocks_that_repeat_are_found(kinds_, expected):
    assert _period(kinds_, 1) == expected


def test_places_of_blocks_count_from_both_ends():
    four, five = (list(shortened([f"layers.{n}" for n in range(count)]).values()) for count in (4, 5))
    assert four == ["layers.0", "layers.1", "layers.-2", "layers.-1"]
    assert set(four) < set(five)


def test_collectives_take_as_long_as_rings_do():
    table = load_table()
    device = structs.replace(table.devices["h100"], latency_us=(1e-9, 1e-9))
    reached = structs.replace(table.efficiency, network=1.0)
    one_node = Collective("fsdp", "all-gather", 8, 1, "forward")
    assert collective_s(one_node, Traffic(1, 450e9), device, reached) == pytest.approx(7 / 8)
    # two of four without a switch have a third of the links
    board = structs.replace(device, switched=False, node_ranks=4)
    pair = one_node._replace(ranks=2)
    assert collective_s(pair, Traffic(1, 150e9), board, reached) == pytest.approx(1 / 2)
    # two nodes of four: four adapters carry the ring
    two = one_node._replace(nodes=2)
    assert collective_s(two, Traffic(1, 200e9), device, reached) == pytest.approx(7 / 8)
    both = one_node._replace(kind="all-reduce")
    assert collective_s(both, Traffic(1, 450e9), device, reached) == pytest.approx(14 / 8)


def test_bubble_is_that_of_the_papers():
    assert bubble_share("1f1b", 1, 4, 12) == pytest.approx(0.25)
    assert bubble_share("interleaved_1f1b", 2, 4, 12) == pytest.approx(0.125)
    assert bubble_share("1f1b", 1, 1, 12) == 0


def test_a_slower_device_takes_longer_and_uncompiled_code_waits_for_the_host():
    job = load_job(DEBUG, SMALL).value
    table = load_table()
    step = plan_of(job, 1, None, "h100", table).stages[0].step
    fast, slow = (
        seconds(step, job, table.devices[name], table.efficiency, 1, 1) for name in ("h100", "a100")
    )
    assert slow.compute > fast.compute and fast.launch == pytest.approx(step.kernels * 6e-6)
    assert fast.low == pytest.approx(max(fast.launch, fast.compute))


def test_rank_that_serves_more_rows_says_and_holds_more():
    flags = [*SMALL, "--model.num_layers=1", "--mesh.ep=2", "--train.global_batch=4"]
    job = load_job("configs/runs/moe_debug.toml", flags).value
    even, more = (stage_on_paper(job, Site(2, 8), skew=skew).step for skew in (1.0, 2.0))

    def sent(step):
        return sum(traffic.bytes for said, traffic in step.collectives.items() if said.axis == "ep")

    # of four all-to-alls of rows two begin where rows are served: half of what is sent doubles
    assert sent(more) / sent(even) == pytest.approx(1.5, rel=0.01)
    peaks = [sum(kinds.highest(step.peaks)[1].values()) for step in (even, more)]
    assert peaks[1] > peaks[0]


def test_tokens_of_sources_follow_the_phases():
    job = load_job("configs/runs/mixture_debug.toml", []).value
    found = tokens_by_source(job)
    total = job.batch_sizes.samples(job.train.steps) * job.data.max_tokens
    assert sum(found.values()) == pytest.approx(total)
    assert found["docs"] == pytest.approx(total * (0.2 + 0.7) / 2)


PAGE = Path(__file__).parents[3] / "docs" / "plan.md"


@pytest.mark.slow
def test_command_of_the_docs_runs(capsys):
    (line,) = [one for one in PAGE.read_text().splitlines() if one.startswith("$ uv run forge ")]
    assert main(line.split()[4:]) == 0
    said = capsys.readouterr().out
    assert "llama-8b on 256 ranks of h100, 32 nodes" in said and "over 32 nodes" in said


def test_table_in_the_docs_is_one(tmp_path):
    text = PAGE.read_text().split("    [devices.h100]")[1].split("\n\n")[0]
    table = tmp_path / "devices.toml"
    table.write_text("[devices.h100]" + text.replace("\n    ", "\n"))
    assert load_table(table).devices["h100"].between_gbs == 25.0
