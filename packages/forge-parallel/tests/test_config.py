import pytest
from forge_parallel.config import (
    FSDPConfig,
    MeshConfig,
    ParallelConfig,
    PrecisionConfig,
    TensorParallelConfig,
)
from forge_parallel.error import ParallelError
from forge_parallel.fp8_config import FP8Config


@pytest.mark.parametrize(
    ("config", "world_size", "sizes"),
    [
        ({}, 1, (1, 1, 1, 1, 1)),
        ({}, 6, (1, 1, 6, 1, 1)),
        ({"dp_replicate": 2}, 8, (1, 2, 4, 1, 1)),
        ({"dp_shard": 4}, 4, (1, 1, 4, 1, 1)),
        ({"dp_replicate": 2, "tp": 2}, 8, (1, 2, 2, 1, 2)),
        ({"pp": 2, "cp": 3}, 12, (2, 1, 2, 3, 1)),
    ],
)
def test_mesh_config_gives_the_ranks_that_are_left_to_dp_shard(config, world_size, sizes):
    found = MeshConfig(**config).sizes(world_size)
    assert found == dict(zip(("pp", "dp_replicate", "dp_shard", "cp", "tp"), sizes, strict=True))


@pytest.mark.parametrize("config", [{"dp_replicate": 3}, {"dp_shard": 2}, {"dp_replicate": 8}])
def test_mesh_config_refuses_sizes_that_do_not_multiply_to_the_ranks(config):
    with pytest.raises(ParallelError, match="product must be 4"):
        MeshConfig(**config).sizes(4)


def test_mesh_config_refuses_zero():
    with pytest.raises(ValueError, match="dp_shard = 0"):
        MeshConfig(dp_shard=0)


def test_precision_config_refuses_pure_bf16_with_float32_compute():
    with pytest.raises(ValueError, match="pure_bf16 = true, which computes in bfloat16"):
        PrecisionConfig(compute="float32", pure_bf16=True)


def test_weights_are_gathered_in_8_bits_with_one_scale_a_tensor_and_not_from_the_host():
    with pytest.raises(ValueError, match='gather = true with recipe = "rowwise"'):
        FP8Config(recipe="rowwise", gather=True)
    fp8 = FP8Config(recipe="tensorwise", gather=True)
    with pytest.raises(ValueError, match=r"needs fsdp\.offload = false"):
        ParallelConfig(fp8=fp8, fsdp=FSDPConfig(offload=True))


@pytest.mark.parametrize(
    ("ranks", "extra_tokens", "tp", "cp", "sequence", "is_refused"),
    [
        (2, 3, 2, 1, True, True),
        (2, 3, 1, 2, False, True),
        (2, 3, 2, 1, False, False),
        (2, 3, 1, 1, True, False),
        (2, 0, 2, 2, True, False),
        (1, 3, 2, 2, True, False),
    ],
)
def test_pipeline_with_extra_tokens_is_refused_where_tokens_are_cut(
    ranks, extra_tokens, tp, cp, sequence, is_refused
):
    config = ParallelConfig(tensor_parallel=TensorParallelConfig(sequence=sequence))
    if not is_refused:
        return config.require_pipeline(ranks, extra_tokens, tp, cp)
    with pytest.raises(ParallelError, match=r"pass on 3 rows beside the tokens.* use .*sequence = false"):
        config.require_pipeline(ranks, extra_tokens, tp, cp)


@pytest.mark.parametrize(
    ("config", "device_type", "dtype", "needs_group"),
    [
        ({}, "cpu", "float32", False),
        ({}, "cuda", "bfloat16", True),
        ({"compute": "float32"}, "cuda", "float32", False),
        ({"compute": "bfloat16"}, "cpu", "bfloat16", True),
        ({"pure_bf16": True}, "cuda", "bfloat16", False),
    ],
)
def test_precision_config_decides_compute_format_and_group(config, device_type, dtype, needs_group):
    precision = PrecisionConfig(**config)
    assert precision.compute_dtype(device_type) == dtype
    assert precision.needs_group(device_type) is needs_group
