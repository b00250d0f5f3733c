"""Where the weights of a run come from: another model's are refused, a checkpoint needs no other folder."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from forge_ckpt import Snapshot, shards
from forge_ckpt.error import CheckpointError
from forge_ckpt.inspect.checkpointed import Checkpointed
from forge_ckpt.interop.weights import write_weights
from forge_ckpt.state import TrainState
from forge_ckpt.store import Store
from forge_config import ConfigError, to_toml
from forge_model import ModelError, config_to_hf, initialize, to_hf
from forge_parallel.mesh import Mesh
from forge_parallel.testing import run_ranks
from forge_trainer.checkpoints.checkpoints import plain, restored, resume_or_start
from forge_trainer.checkpoints.initial_weights import copy_common, set_initial_weights
from forge_trainer.checkpoints.open import open_store
from forge_trainer.cli import main
from forge_trainer.config.job import load_job
from forge_trainer.progress import Progress
from forge_trainer.run_dir.files import read_job
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

RUN = Path(__file__).parents[3] / "configs" / "runs" / "debug.toml"
OTHER = {
    "rope_theta": (["--model.rope.theta=100.0"], ["rope.theta: 100.0, there 10000.0"]),
    "heads": (
        ["--model.attention.num_heads=10"],
        ["attention.num_heads: 10, there 5", "attention.head_dim: 16, there 32"],
    ),
    "eps": (["--model.norm.eps=0.1"], ["norm.eps: 0.1, there 1e-05"]),
    "tied": (["--model.tie_embeddings=true"], ["tie_embeddings: True, there False"]),
    "two": (["--model.norm.eps=0.1", "--model.num_layers=3"], ["norm.eps: 0.1", "num_layers: 3, there 4"]),
}


def job_of(tmp_path, *overrides):
    return load_job(RUN, [f'--job.root="{tmp_path / "runs"}"', *overrides]).value


@pytest.fixture
def pretrained(tmp_path):
    """A folder of weights of the model of the debug run, and that model."""
    config = job_of(tmp_path).model
    model = config.build()
    initialize(model, 5)
    write_weights(tmp_path / "hf", to_hf(dict(model.named_parameters()), config), config_to_hf(config))
    return tmp_path / "hf", model


def weights_of(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_init_from_takes_the_weights_of_the_same_model(tmp_path, pretrained):
    folder, model = pretrained
    job = job_of(tmp_path, f'--train.init_from="{folder}"', "--model.max_tokens=300", "--model.init_std=0.1")
    ours = job.model.build()
    set_initial_weights([ours], job)
    for name, value in weights_of(ours).items():
        assert torch.equal(value, weights_of(model)[name]), name


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_init_from_quantized_weights_is_refused(tmp_path, pretrained, dtype):
    folder, model = pretrained
    tensors = to_hf(dict(model.named_parameters()), job_of(tmp_path).model)
    name = "model.layers.0.mlp.up_proj.weight"
    config = json.loads((folder / "config.json").read_text())
    write_weights(tmp_path / "q", {**tensors, name: (tensors[name] * 100).to(dtype)}, config)
    job = job_of(tmp_path, f'--train.init_from="{tmp_path / "q"}"')
    with pytest.raises(CheckpointError, match=r"layers.0.ffn.w_up.weight .* is .*int8|float8"):
        set_initial_weights([job.model.build()], job)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_init_from_takes_weights_of_other_precisions(tmp_path, pretrained, dtype):
    folder, model = pretrained
    config, hf = job_of(tmp_path).model, json.loads((folder / "config.json").read_text())
    tensors = {name: value.to(dtype) for name, value in to_hf(weights_of(model), config).items()}
    write_weights(tmp_path / "other", tensors, hf)
    job = job_of(tmp_path, f'--train.init_from="{tmp_path / "other"}"')
    ours = job.model.build()
    set_initial_weights([ours], job)
    for name, value in weights_of(ours).items():
        assert torch.equal(value, weights_of(model)[name].to(dtype).float()), name


def test_init_from_is_kept_as_an_absolute_name(tmp_path, pretrained, monkeypatch):
    monkeypatch.chdir(pretrained[0].parent)
    job = job_of(tmp_path, f'--train.init_from="{pretrained[0].name}"')
    assert job.train.init_from == str(pretrained[0])


def test_init_from_gives_each_part_its_own_tensors(tmp_path, pretrained):
    folder, model = pretrained
    job = job_of(tmp_path, f'--train.init_from="{folder}"')
    parts = [job.model.build(), job.model.build()]
    names = list(dict(parts[0].named_children()))
    for part, others in zip(parts, (names[:1], names[1:]), strict=True):
        for name in others:
            setattr(part, name, None)
    set_initial_weights(parts, job)
    found = weights_of(parts[0]) | weights_of(parts[1])
    assert found.keys() == weights_of(model).keys()
    assert all(torch.equal(value, found[name]) for name, value in weights_of(model).items())


@pytest.mark.parametrize("case", OTHER)
def test_init_from_another_model_is_refused_when_the_job_is_read(tmp_path, pretrained, case):
    overrides, expected = OTHER[case]
    with pytest.raises(ConfigError) as caught:
        job_of(tmp_path, f'--train.init_from="{pretrained[0]}"', *overrides)
    assert all(line in str(caught.value) for line in expected)


@pytest.mark.parametrize("case", OTHER)
def test_init_from_another_model_is_refused_before_a_weight_is_read(tmp_path, pretrained, case):
    overrides, expected = OTHER[case]
    folder, hidden = pretrained[0], pretrained[0].with_name("hidden")
    folder.rename(hidden)
    job = job_of(tmp_path, f'--train.init_from="{folder}"', *overrides)
    hidden.rename(folder)
    model = job.model.build()
    initialize(model, 1)
    before = weights_of(model)
    with pytest.raises(ModelError) as caught:
        set_initial_weights([model], job)
    assert all(line in str(caught.value) for line in expected)
    assert all(torch.equal(value, before[name]) for name, value in weights_of(model).items())


def test_a_checkpoint_needs_no_folder_of_initial_weights(tmp_path, pretrained):
    folder, _ = pretrained
    job = job_of(tmp_path, f'--train.init_from="{folder}"')
    model = job.model.build()
    store = Store(job.job.directory / "checkpoints")
    state = TrainState([model], torch.optim.SGD(model.parameters()))
    assert resume_or_start(store, state, [model], job) == (Progress(), None, {}, {})
    progress = {"step": 3, "samples": 6, "tokens": 12}
    store.save(3, state.capture({"progress": progress, "data": "x"}, copy=False))
    before = weights_of(model)
    (folder / "config.json").write_text(json.dumps({"model_type": "another"}))
    again = job_of(tmp_path, f'--train.init_from="{folder}"')
    for name in ("config.json", "model.safetensors"):
        (folder / name).unlink()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert resume_or_start(store, state, [model], again) == (Progress(3, 6, 12), "x", {}, {})
    assert all(torch.equal(value, before[name]) for name, value in weights_of(model).items())


@pytest.fixture
def donor(tmp_path):
    """Another run of the debug model, of which step 7 is saved, and the model."""
    config = job_of(tmp_path).model
    model = config.build()
    initialize(model, 5)
    store = Store(tmp_path / "runs" / "donor" / "checkpoints")
    store.save(7, TrainState([model], torch.optim.SGD(model.parameters())).capture())
    text = to_toml(job_of(tmp_path, '--job.name="donor"'))
    (tmp_path / "runs" / "donor" / "config.toml").write_text(text)
    return tmp_path / "runs" / "donor", model


def started(job):
    model = job.model.build()
    set_initial_weights([model], job)
    return weights_of(model)


@pytest.mark.parametrize("form", ["{}@7", "{}/checkpoints@7", "{}/checkpoints/step-000000007"])
def test_init_from_takes_the_checkpoint_of_another_run(tmp_path, donor, form, capsys):
    found = started(job_of(tmp_path, f'--train.init_from="{form.format(donor[0])}"'))
    assert all(torch.equal(value, found[name]) for name, value in weights_of(donor[1]).items())
    assert f"{len(found)} of {len(found)} tensors are those of" in capsys.readouterr().out


def test_branch_of_a_run_needs_the_weights_no_more_that_it_started_from(tmp_path, donor):
    name = f"{donor[0]}@7"
    old, new = tmp_path / "runs" / "old", tmp_path / "runs" / "new"
    job = job_of(tmp_path, '--job.name="old"', f'--train.init_from="{name}"')
    shutil.copytree(donor[0], old)
    (old / "config.toml").write_text(to_toml(job))
    shutil.rmtree(donor[0])
    assert main(["branch", str(old), str(new)]) == 0
    assert read_job(new).train.init_from == name
    assert (new / "checkpoints" / "step-000000007").is_dir()


def test_init_from_weights_that_are_damaged_says_of_none_that_they_are_taken(tmp_path, donor, capsys):
    job = job_of(tmp_path, f'--train.init_from="{donor[0]}@7"')
    values = donor[0] / "checkpoints" / "step-000000007" / "rank-00000.bin"
    values.write_bytes(values.read_bytes()[:-64] + bytes(64))
    with pytest.raises(CheckpointError, match="is damaged"):
        started(job)
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["--train.init_from='{}'"], ["say of which step", "donor@7"]),
        (["--train.init_from='{}@8'"], ["donor@8", "has steps 7"]),
        (["--train.init_from='{}@7x'"], ["has steps 7"]),
        (
            ["--train.init_from='{}@7'", "--model.norm.eps=0.1"],
            ["norm.eps: 0.1, there 1e-05", "init_exclude"],
        ),
        (["--train.init_include=['head']"], ["without init_from"]),
    ],
)
def test_init_from_a_run_is_refused_when_the_job_is_read(tmp_path, donor, overrides, expected):
    with pytest.raises(ConfigError) as caught:
        job_of(tmp_path, *(one.format(donor[0]) for one in overrides))
    assert all(text in str(caught.value) for text in expected), str(caught.value)


def test_init_include_and_exclude_take_some_tensors_and_say_which(tmp_path, donor, capsys):
    patterns = ["--train.init_include=['layers']", "--train.init_exclude=['layers.*.ffn', 'layers.0']"]
    job = job_of(tmp_path, f'--train.init_from="{donor[0]}@7"', "--model.norm.eps=0.1", *patterns)
    found, random = started(job), started(job_of(tmp_path))
    taken = {name for name in found if name.startswith("layers.") and ".ffn." not in name}
    taken -= {name for name in found if name.startswith("layers.0.")}
    for name, value in weights_of(donor[1]).items():
        assert torch.equal(found[name], value if name in taken else random[name]), name
    told = capsys.readouterr().out
    assert f"{len(taken)} of {len(found)} tensors are those of {donor[0]}@7" in told
    assert "norm.eps: 0.1, there 1e-05" in told and "  not taken  head.weight\n" in told


@pytest.mark.parametrize("origin", ["donor", "pretrained"])
def test_init_resize_takes_what_both_have_in_common(tmp_path, request, origin, capsys):
    folder, model = request.getfixturevalue(origin)
    name = f"{folder}@7" if origin == "donor" else folder
    overrides = ["--model.vocab_size=300", "--model.num_layers=5", "--train.init_exclude=['layers.4']"]
    base = [f'--train.init_from="{name}"', *overrides]
    grown = started(job_of(tmp_path, *base, "--train.init_resize=['embed', 'head']"))
    random, old = started(job_of(tmp_path, *overrides[:2])), weights_of(model)
    for name, value in grown.items():
        rows = len(old[name]) if name in old else 0
        assert torch.equal(value[:rows], old[name]) if rows else True, name
        assert torch.equal(value[rows:], random[name][rows:]), name
    assert "head.weight: [260, 160] there, [300, 160] here" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match=r"not fit the model \(2\):(?s:.*)head.weight is \[260, 160\]"):
        started(job_of(tmp_path, *base))
    with pytest.raises(CheckpointError, match=r"name no tensor: layers\.9"):
        started(job_of(tmp_path, *base, "--train.init_resize=['layers.9']"))


def test_init_from_a_damaged_checkpoint_is_refused(tmp_path, donor):
    path = donor[0] / "checkpoints" / "step-000000007" / "rank-00000.bin"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="is damaged between bytes"):
        started(job_of(tmp_path, f'--train.init_from="{donor[0]}@7"'))


@pytest.mark.parametrize("shape", [(6, 5), (3, 9), (1, 1), (4, 4)])
def test_copy_common_of_a_sharded_tensor_copies_what_one_process_would(shape):
    run_ranks(_copies_like_one_process, 2, shape)


def box(start, size):
    return tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))


def _copies_like_one_process(shape):
    source, whole = torch.arange(float(shape[0] * shape[1])).reshape(shape), torch.full((4, 7), -1.0)
    expected = whole.clone()
    rows, columns = min(shape[0], 4), min(shape[1], 7)
    expected[:rows, :columns] = source[:rows, :columns]
    for dim in (0, 1):
        cut = distribute_tensor(whole.clone(), init_device_mesh("cpu", (2,)), [Shard(dim)])
        copy_common(shape, lambda start, size: source[box(start, size)], cut)
        assert torch.equal(cut.full_tensor(), expected)


@pytest.mark.parametrize("lost", ["", "checkpoints"])
def test_run_whose_folder_vanished_does_not_start_at_step_0(tmp_path, lost):
    job = job_of(tmp_path)
    model = torch.nn.Linear(2, 2)
    state = TrainState([model], torch.optim.SGD(model.parameters()))
    open_store(job, Mesh(torch.device("cpu"))).save(3, state.capture())
    shutil.rmtree(job.job.directory / lost)
    with pytest.raises(CheckpointError, match=r"once held step 3.*\.progress/debug"):
        resume_or_start(open_store(job, Mesh(torch.device("cpu"))), state, [model], job)


def test_init_from_that_leaves_nothing_is_refused(tmp_path, donor):
    patterns = ["--train.init_include=['layers.0']", "--train.init_exclude=['layers']"]
    with pytest.raises(CheckpointError, match="leave nothing of"):
        started(job_of(tmp_path, f'--train.init_from="{donor[0]}@7"', *patterns))


def test_init_from_a_checkpoint_reads_what_a_rank_holds(tmp_path):
    store = Store(tmp_path)
    store.save(7, Snapshot({"model.head.weight": torch.randn(4096, 512)}))
    run_ranks(_reads_its_part, 2, str(store.folder(7)))


def _reads_its_part(folder):
    read, original = [], shards._read_blocks

    def counted(file, path, first, last, *rest):
        read.append(last - first)
        return original(file, path, first, last, *rest)

    shards._read_blocks = counted
    try:
        there, mesh = Checkpointed(Path(folder), "model."), init_device_mesh("cpu", (2,))
        name = "head.weight"
        entry = there.entry(name)
        target = distribute_tensor(torch.zeros(entry.shape), mesh, [Shard(0)])
        copy_common(entry.shape, partial(there.part, name), target)
    finally:
        shards._read_blocks = original
    rank, whole = torch.distributed.get_rank(), there[name]
    assert torch.equal(target.to_local(), whole.chunk(2)[rank])
    assert whole.nbytes / 2 <= sum(read) <= whole.nbytes / 2 + 2 * shards.BLOCK_BYTES


def test_state_of_hooks_comes_back_exactly():
    state = {"best": float("inf"), "mean": [float("nan"), -0.0], "seen": {"a": 2**70}, "none": None}
    back = restored(json.loads(json.dumps(plain("hook", state), allow_nan=False)))
    assert repr(back) == repr(state)
    assert restored({"skipped": 3}) == {"skipped": 3}  # as older versions wrote it
    with pytest.raises(ConfigError, match=r"hook: state\(\) returned what a checkpoint cannot hold"):
        plain("hook", {"x": object()})
