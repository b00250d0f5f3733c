import sys
import textwrap
from subprocess import run

import pytest
import torch
from forge_parallel.config import MeshConfig
from forge_parallel.env import Env, process_group
from forge_parallel.error import ParallelError
from forge_parallel.mesh import build_mesh
from forge_parallel.testing import run_ranks

CPU = torch.device("cpu")


@pytest.fixture
def cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def gpus(monkeypatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_env_is_alone_without_a_launcher(cpu):
    assert Env.detect({}) == Env(0, 0, 1, torch.device("cpu"), "none")


def test_env_reads_torchrun(cpu):
    env = Env.detect({"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "SLURM_PROCID": "3"})
    assert env == Env(5, 1, 8, torch.device("cpu"), "torchrun")


def test_env_reads_a_slurm_step(cpu):
    env = Env.detect({"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "4"})
    assert env == Env(3, 1, 4, torch.device("cpu"), "slurm")


def test_env_is_alone_in_a_batch_script_without_srun(cpu):
    assert Env.detect({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}).world_size == 1


def test_env_names_the_variables_that_are_missing(cpu):
    with pytest.raises(ParallelError, match="LOCAL_RANK, WORLD_SIZE"):
        Env.detect({"RANK": "0"})


@pytest.mark.parametrize(("count", "index"), [(4, 2), (1, 0)])
def test_env_takes_its_gpu_also_when_it_sees_only_its_own(monkeypatch, count, index):
    gpus(monkeypatch, count)
    environ = {"RANK": "2", "LOCAL_RANK": "2", "WORLD_SIZE": "4"}
    assert Env.detect(environ).device == torch.device("cuda", index)


def test_env_refuses_more_ranks_than_gpus(monkeypatch):
    gpus(monkeypatch, 2)
    with pytest.raises(ParallelError, match="2 GPUs"):
        Env.detect({"RANK": "2", "LOCAL_RANK": "2", "WORLD_SIZE": "4"})


def test_process_group_is_none_for_a_lone_process_unless_needed(cpu):
    import torch.distributed as dist

    with process_group(Env.detect({})):
        assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match="inside"), process_group(Env.detect({}), needed=True):
        assert dist.get_world_size() == 1
        raise RuntimeError("inside")
    assert not dist.is_initialized()


def test_process_group_finds_the_master_of_a_slurm_step(cpu, monkeypatch, tmp_path):
    import torch.distributed as dist

    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\n[ $3 = 'n[1-2]' ] && echo 127.0.0.1 && echo other\n")
    scontrol.chmod(0o755)
    for name, value in {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "SLURM_STEP_NODELIST": "n[1-2]",
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "2",
    }.items():
        monkeypatch.setenv(name, value)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    seen = {}
    monkeypatch.setattr(dist, "init_process_group", lambda **options: seen.update(options))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    with process_group(Env(1, 0, 2, torch.device("cpu"), "slurm"), timeout_s=5):
        import os

        assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == (
            "127.0.0.1",
            str(20000 + 7 + 2 * 997),
        )
    assert (seen["rank"], seen["world_size"], seen["timeout"].total_seconds()) == (1, 2, 5)


def test_process_group_tells_nccl_its_device(monkeypatch):
    import torch.distributed as dist

    gpus(monkeypatch, 4)
    seen = {}
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **options: seen.update(options))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    with process_group(Env(2, 2, 4, torch.device("cuda", 2), "torchrun")):
        assert seen["device_id"] == torch.device("cuda", 2)


def test_build_mesh_refuses_several_ranks_without_a_process_group(cpu):
    with pytest.raises(ParallelError, match="2 ranks and no process group"):
        build_mesh(MeshConfig(), Env(0, 0, 2, torch.device("cpu"), "torchrun"))


def test_a_lone_float32_process_loads_neither_fsdp_nor_the_compiler():
    script = textwrap.dedent("""
        import sys
        import forge_parallel.config
        assert "torch" not in sys.modules
        import torch
        from torch import nn
        from forge_parallel import *
        from forge_parallel.capabilities import without_dynamo

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.blocks = nn.ModuleList([nn.Linear(2, 2)])
            def forward(self, x):
                return self.blocks[0](x)

        env = Env.detect({})
        with process_group(env):
            with torch.device("meta"), without_dynamo():
                model = Net()
            mesh = build_mesh(MeshConfig(), env)
            parallelize(model, mesh, Plan.of({"blocks": "blocks.*"}))
            materialize(model, torch.device("cpu"))
            load_full(model, {n: torch.ones_like(p) for n, p in model.named_parameters()})
            model(torch.ones(1, 2)).sum().backward()
            norm = global_norm(model.parameters(), mesh)
            clip_(model.parameters(), 1.0, norm)
            for options in ({"fused": True}, {"foreach": True}, {}):
                with without_dynamo():
                    optimizer = torch.optim.AdamW(model.parameters(), **options)
                    optimizer.step()
                    optimizer.state_dict()
                    optimizer.zero_grad(set_to_none=False)
        loaded = [n for n in ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor")
                  if n in sys.modules]
        assert not loaded, loaded
        assert not any(k == "__dynamo_disable" for k in vars(torch.optim.Optimizer.zero_grad.__wrapped__))
        import torch._dynamo
        assert torch._dynamo.config is not None
        optimizer.step()
        assert torch.optim.Optimizer.zero_grad.__wrapped__ is not None
    """)
    done = run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def patience(sizes: dict) -> set[float]:
    """Seconds that the collectives of all groups may take."""
    mesh = build_mesh(MeshConfig(**sizes), Env.detect())
    groups = [torch.distributed.group.WORLD, mesh.control_group, mesh.loss.group, mesh.stage.group]
    groups += [group for one in (mesh.fsdp, mesh.tp) if one is not None for group in one.get_all_groups()]
    backends = [group._get_backend(CPU) for group in groups if group is not None]
    return {backend.options._timeout.total_seconds() for backend in backends}  # type: ignore[attr-defined]


@pytest.mark.dist
@pytest.mark.parametrize(("ranks", "sizes"), [(1, {}), (4, {"tp": 2})])
def test_all_groups_are_as_patient_as_the_default_group(ranks, sizes):
    assert run_ranks(patience, ranks, sizes, timeout_s=77) == [{77.0}] * ranks


def test_env_gives_a_gpu_its_number_as_set_device_wants_it(monkeypatch):
    gpus(monkeypatch, 4)
    assert Env(2, 2, 4, torch.device("cuda"), "torchrun").device == torch.device("cuda", 2)
    gpus(monkeypatch, 1)
    lone = Env(3, 3, 4, torch.device("cuda"), "slurm")
    assert lone.device == torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch._C, "_cuda_setDevice", lambda index: None, raising=False)
    with process_group(Env(0, 0, 1, torch.device("cuda"), "none")):
        pass


def played(monkeypatch) -> list[str]:
    """A default group whose work never ends, as that of NCCL after a rank has failed: what ends it."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    gpus(monkeypatch, 1)
    said: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **options: said.append("made"))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: said.append("destroyed"))
    monkeypatch.setattr(distributed_c10d, "_abort_process_group", lambda *_: said.append("aborted"))
    return said


def test_process_group_is_aborted_where_a_rank_fails_for_its_work_may_never_end(monkeypatch):
    said = played(monkeypatch)
    env = Env(0, 0, 2, torch.device("cuda", 0), "torchrun")
    with pytest.raises(ZeroDivisionError), process_group(env):
        raise ZeroDivisionError
    assert said == ["made", "aborted"]
    with process_group(env):
        pass
    assert said == ["made", "aborted", "made", "destroyed"]


def test_an_abort_that_fails_hides_not_why_the_rank_failed(monkeypatch):
    from torch.distributed import distributed_c10d

    played(monkeypatch)

    def broken(*_):
        raise RuntimeError("no backend can be aborted")

    monkeypatch.setattr(distributed_c10d, "_abort_process_group", broken)
    with pytest.raises(ZeroDivisionError), process_group(Env(0, 0, 2, torch.device("cuda", 0), "torchrun")):
        raise ZeroDivisionError
