import copy

import numpy as np
import pytest
import torch
from forge_interp.analysis.accumulate import Moments
from forge_interp.errors import InterpError

WIDTHS = {"a": 5, "b": 3, "c": 4}


def make_blocks(n: int = 60, seed: int = 0) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    mix = torch.randn(6, 12, generator=random, dtype=torch.float64)
    x = torch.randn(n, 6, generator=random, dtype=torch.float64) @ mix + 50.0
    return dict(zip(WIDTHS, x.split(list(WIDTHS.values()), dim=1), strict=True))


def assert_equal_moments(found: Moments, blocks: dict[str, torch.Tensor]) -> None:
    centred = {name: x - x.mean(0) for name, x in blocks.items()}
    assert found.count == len(blocks["a"])
    for a, x in centred.items():
        torch.testing.assert_close(found.mean(a), blocks[a].mean(0), rtol=1e-12, atol=0)
        for b, y in centred.items():
            torch.testing.assert_close(found.comoment(a, b), x.T @ y, rtol=1e-10, atol=1e-9)
            expected = (x.square().sum(1) * y.square().sum(1)).sum().item()
            assert found.cross_power(a, b) == pytest.approx(expected, rel=1e-11)


@pytest.mark.parametrize("batch", [1, 7, 60])
def test_moments_equal_two_passes_for_any_batching(batch):
    blocks = make_blocks()
    found = Moments(WIDTHS)
    for start in range(0, 60, batch):
        found.update({name: x[start : start + batch] for name, x in blocks.items()})
    assert_equal_moments(found, blocks)


def test_moments_keep_precision_when_means_are_huge():
    blocks = make_blocks()
    shifted = {name: x + 1e6 for name, x in blocks.items()}
    found = Moments(WIDTHS)
    for start in range(0, 60, 6):
        found.update({name: x[start : start + 6] for name, x in shifted.items()})
    for name, x in blocks.items():
        centred = x - x.mean(0)
        torch.testing.assert_close(found.comoment(name, name), centred.T @ centred, rtol=1e-7, atol=1e-6)


def test_moments_may_be_read_and_then_updated():
    blocks = make_blocks()
    found = Moments(WIDTHS)
    found.update({name: x[:20] for name, x in blocks.items()})
    found.comoment("a", "b")
    found.update({name: x[20:] for name, x in blocks.items()})
    assert_equal_moments(found, blocks)


@pytest.mark.parametrize("cut", [0, 1, 23, 60])
def test_merge_equals_one_pass(cut):
    blocks = make_blocks()
    first, second = Moments(WIDTHS), Moments(WIDTHS)
    first.update({name: x[:cut] for name, x in blocks.items()})
    second.update({name: x[cut:] for name, x in blocks.items()})
    before = {name: tensor.clone() for name, tensor in second.state().items()}
    assert_equal_moments(first.merge(second), blocks)
    assert all(torch.equal(before[name], tensor) for name, tensor in second.state().items())


def test_all_reduce_equals_one_pass_when_a_rank_is_empty():
    blocks = make_blocks()
    cuts = [(0, 11), (11, 11), (11, 60)]
    ranks = [Moments(WIDTHS) for _ in cuts]
    for rank, (start, stop) in zip(ranks, cuts, strict=True):
        rank.update({name: x[start:stop] for name, x in blocks.items()})
    # Every rank makes the same calls in the same order, so the n-th calls are one collective: record
    # what each rank offers, then replay with the sums known so far, until every call is known.
    sums: list[torch.Tensor] = []
    for _ in range(10):
        offers = [_replay(copy.deepcopy(rank), sums) for rank in ranks]
        if offers[0] is None:
            break
        sums.append(torch.stack([offer for offer in offers if offer is not None]).sum(0))
    for rank in ranks:
        assert _replay(rank, sums) is None
        assert_equal_moments(rank, blocks)


def test_all_reduce_sums_over_the_default_process_group(tmp_path):
    blocks = make_blocks()
    store = f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        assert_equal_moments(Moments.of(blocks).all_reduce(), blocks)
    finally:
        torch.distributed.destroy_process_group()


class _Unknown(Exception):
    pass


def _replay(rank: Moments, sums: list[torch.Tensor]) -> torch.Tensor | None:
    calls = 0
    offered = None

    def add(tensor: torch.Tensor) -> None:
        nonlocal calls, offered
        if calls == len(sums):
            offered = tensor.clone()
            raise _Unknown
        tensor.copy_(sums[calls])
        calls += 1

    try:
        rank.all_reduce(add)
    except _Unknown:
        return offered
    return None


def test_state_round_trips():
    blocks = make_blocks()
    found = Moments.of(blocks)
    saved = {name: tensor.clone() for name, tensor in found.state().items()}
    assert_equal_moments(Moments(WIDTHS).load_state(saved), blocks)


def test_between_keeps_only_the_asked_pairs_and_their_values():
    blocks = make_blocks()
    found = Moments.of(blocks, between=(["a"], ["c"]))
    centred = {name: x - x.mean(0) for name, x in blocks.items()}
    torch.testing.assert_close(found.comoment("c", "a"), centred["c"].T @ centred["a"])
    assert found.state()["products"].numel() == 7 * 7 + 5 * 5 + 6 * 6 + 7 * 6  # of rows [1, x, |x|^2]
    with pytest.raises(InterpError, match="not accumulated"):
        found.comoment("a", "b")


def test_moments_take_numpy_and_bfloat16():
    x = torch.randn(20, 5).bfloat16()
    found = Moments.of({"a": x, "b": x.float().numpy()})
    torch.testing.assert_close(found.comoment("a", "a"), found.comoment("b", "b"), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"a": np.zeros((4, 5))}, "expected \\['a', 'b', 'c'\\]"),
        ({"a": np.zeros((4, 5)), "b": np.zeros((4, 2)), "c": np.zeros((4, 4))}, "b has 2 features"),
        ({"a": np.zeros((4, 5)), "b": np.zeros((3, 3)), "c": np.zeros((4, 4))}, "rows are"),
        ({"a": np.zeros((4, 5, 1)), "b": np.zeros((4, 3)), "c": np.zeros((4, 4))}, "expected \\[samples"),
    ],
)
def test_update_rejects_a_batch_that_does_not_fit(batch, message):
    with pytest.raises(InterpError, match=message):
        Moments(WIDTHS).update(batch)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_update_names_the_block_that_holds_nan_and_adds_nothing(bad):
    blocks, broken = make_blocks(), make_blocks()
    broken["b"][3, 1] = bad
    found = Moments(WIDTHS)
    with pytest.raises(InterpError, match="b holds 1 values that are NaN or infinite"):
        found.update(broken)
    assert not any(tensor.any() for tensor in found.state().values())
    found.update(blocks)
    assert_equal_moments(found, blocks)


def test_readout_refuses_squares_that_overflow():
    found = Moments.of({"a": torch.randn(9, 2, dtype=torch.float64) * 1e200})
    with pytest.raises(InterpError, match="squared norms"):
        found.comoment("a", "a")


def test_merge_rejects_other_blocks():
    with pytest.raises(InterpError, match="cannot merge"):
        Moments(WIDTHS).merge(Moments({"a": 5}))


def test_update_takes_a_batch_without_rows():
    blocks = make_blocks()
    found = Moments(WIDTHS)
    for rows in (slice(0), slice(None), slice(0)):
        found.update({name: x[rows] for name, x in blocks.items()})
    assert_equal_moments(found, blocks)


def test_moments_of_too_few_samples_cannot_be_read():
    found = Moments({"a": 2})
    with pytest.raises(InterpError, match="0 samples"):
        found.mean("a")
    found.update({"a": np.ones((1, 2))})
    assert found.mean("a").tolist() == [1, 1]
    for read in (found.power, lambda name: found.comoment(name, name)):
        with pytest.raises(InterpError, match="1 samples were given; expected at least 2"):
            read("a")


def test_power_is_the_trace_and_zero_for_a_constant_block_however_batched():
    blocks = make_blocks()
    found = Moments.of(blocks)
    for name in blocks:
        assert found.power(name) == pytest.approx(found.comoment(name, name).trace().item(), rel=1e-12)
    random = np.random.default_rng(0)
    for _ in range(40):
        n, constant = int(random.integers(5, 300)), random.normal(size=3) * 10 ** random.uniform(-3, 6)
        first, second = (Moments({"c": 3, "x": 2}) for _ in range(2))
        for part in np.array_split(np.arange(n), int(random.integers(1, 6))):
            batch = {"c": np.tile(constant, (len(part), 1)), "x": random.normal(size=(len(part), 2))}
            (first if len(part) % 2 else second).update(batch)
        assert first.merge(second).power("c") == 0
        assert first.power("x") > 0
        first.update({"c": np.tile(constant * (1 + 1e-9), (n, 1)), "x": random.normal(size=(n, 2))})
        assert first.power("c") > 0


def test_what_was_read_does_not_change_with_a_later_update():
    blocks = make_blocks()
    found = Moments.of(blocks)
    comoment, mean = found.comoment("a", "b"), found.mean("a")
    before = comoment.clone(), mean.clone()
    found.update({name: 3 * x + 1 for name, x in blocks.items()})
    assert torch.equal(comoment, before[0]) and torch.equal(mean, before[1])


def test_moments_of_blocks_of_different_dtypes_equal_those_of_their_values():
    blocks = {"a": torch.randn(20, 5).bfloat16(), "b": np.arange(60).reshape(20, 3), "c": torch.randn(20, 4)}
    expected = Moments.of({name: torch.as_tensor(x).double() for name, x in blocks.items()})
    found = Moments.of(blocks)
    for name, tensor in expected.state().items():
        assert torch.equal(found.state()[name], tensor)


def test_moments_refuse_bad_blocks_and_states():
    with pytest.raises(InterpError, match=r"widths are \{\}"):
        Moments.of({})
    with pytest.raises(InterpError, match=r"widths are \{'a': 0\}"):
        Moments({"a": 0})
    with pytest.raises(InterpError, match=r"between names \['d'\]"):
        Moments(WIDTHS, between=(["a"], ["d"]))
    state = Moments(WIDTHS).state()
    other = Moments.of({"a": torch.randn(9, 5)})
    with pytest.raises(InterpError, match=r"state 'centre' has \(12,\); expected shape \(5,\)"):
        other.load_state(state)
    assert other.count == 9
    with pytest.raises(InterpError, match="state 'centre' has nothing"):
        Moments(WIDTHS).load_state({})


def test_all_reduce_and_merge_of_nothing_leave_an_accumulator_to_use():
    blocks = make_blocks()
    found = Moments(WIDTHS).merge(Moments(WIDTHS)).all_reduce(lambda tensor: None)
    assert found.count == 0
    found.update(blocks)
    assert_equal_moments(found.merge(Moments(WIDTHS)), blocks)


def test_reading_twice_changes_no_bit_of_the_sums():
    found = Moments.of(make_blocks())
    found.comoment("a", "b")
    before = {name: tensor.clone() for name, tensor in found.state().items()}
    found.comoment("a", "b")
    assert all(torch.equal(before[name], tensor) for name, tensor in found.state().items())


def test_power_of_what_rounding_alone_moves_is_zero():
    random = np.random.default_rng(0)
    constant = np.tile([1e6 + 0.1, 0.3], (50, 1))
    jitter = constant * (1 + 1e-15 * random.normal(size=(50, 2)))
    assert Moments.of({"c": jitter}).power("c") == 0
    assert Moments.of({"c": constant * (1 + 1e-9 * random.normal(size=(50, 2)))}).power("c") > 0
