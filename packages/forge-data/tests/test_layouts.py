import itertools

import numpy as np
import pytest
from forge_data.packing.layouts import Layout, bestfit, crop, cut, layouts, pad
from forge_data.sources.config import PythonStdlibConfig

T = 8


def _documents(seed: int, count: int, longest: int) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.random.default_rng(seed).integers(1, longest, count)
    return np.cumsum(lengths) - lengths, lengths


def _rows(layout: Layout) -> list[list[tuple[int, int]]]:
    pieces = list(zip(layout.starts.tolist(), layout.lengths.tolist(), strict=True))
    edges = [0, *layout.ends.tolist()]
    return [pieces[a:b] for a, b in itertools.pairwise(edges)]


def _best_fit_one_by_one(sizes: list[int], capacity: int) -> list[int]:
    """How full each row is when the longest piece left goes where it leaves the least room."""
    full: list[int] = []
    for size in sorted(sizes, reverse=True):
        fitting = [row for row, used in enumerate(full) if used + size <= capacity]
        if fitting:
            full[max(fitting, key=lambda row: full[row])] += size
        else:
            full.append(size)
    return sorted(full)


@pytest.mark.parametrize("seed", range(6))
def test_bestfit_fills_rows_as_placing_one_by_one_does(seed: int) -> None:
    layout = bestfit(*_documents(seed, 200, 14), T)
    full = [sum(size for _, size in row) for row in _rows(layout)]
    assert sorted(full) == _best_fit_one_by_one(layout.lengths.tolist(), T + 1)


@pytest.mark.parametrize("name", ["bestfit", "pad"])
def test_layout_makes_every_token_but_the_first_of_a_document_a_target_once(name: str) -> None:
    starts, lengths = _documents(3, 300, 40)
    targets = [
        t for row in _rows(layouts[name](starts, lengths, T)) for a, n in row for t in range(a + 1, a + n)
    ]
    assert sorted(targets) == sorted(set(range(int(lengths.sum()))) - set(starts.tolist()))


@pytest.mark.parametrize("name", ["bestfit", "pad"])
def test_layout_cuts_only_documents_longer_than_a_row(name: str) -> None:
    starts, lengths = _documents(4, 300, 20)
    placed = set(zip(*layouts[name](starts, lengths, T)[:2], strict=True))
    for document in zip(starts, lengths, strict=True):
        assert (document in placed) == (document[1] <= T + 1)


def test_pad_gives_each_piece_a_row() -> None:
    starts, lengths = np.asarray([0, 3, 20]), np.asarray([3, 17, 1])
    assert _rows(pad(starts, lengths, T)) == [[(0, 3)], [(3, 9)], [(11, 9)], [(20, 1)]]


def test_crop_begins_rows_with_documents_and_leaves_out_what_does_not_fit() -> None:
    starts, lengths = np.asarray([0, 5, 15, 18, 40]), np.asarray([5, 10, 3, 22, 4])
    assert _rows(crop(starts, lengths, T)) == [[(0, 5), (5, 4)], [(15, 3), (18, 6)], [(40, 4)]]


def test_bestfit_pads_next_to_nothing_of_a_corpus_with_long_and_short_documents() -> None:
    """Lengths as of web text: half of them below 734 tokens."""
    lengths = np.maximum(1, np.random.default_rng(0).lognormal(np.log(734), 1.05, 20_000)).astype(np.int64)
    layout = bestfit(np.cumsum(lengths) - lengths, lengths, 2048)
    assert 1 - layout.lengths.sum() / (2049 * len(layout.ends)) < 1e-3


def fewest_rows(sizes: np.ndarray, capacity: int) -> int:
    """No packing has fewer rows: the bound L2 of Martello & Toth 1990, doi:10.1016/0166-218X(90)90094-S.

    For any k, pieces above capacity - k need a row of their own, so do those above half of it, and what
    room the latter leave, pieces from k on must fit in or need further rows.
    """
    half, bound = capacity / 2, 0
    for k in np.unique(np.concatenate([[0], sizes[sizes <= half]])):
        wide = sizes[(sizes > half) & (sizes <= capacity - k)]
        narrow = sizes[(sizes >= k) & (sizes <= half)].sum() - (capacity * len(wide) - wide.sum())
        bound = max(
            bound, int((sizes > capacity - k).sum()) + len(wide) + max(0, -(-int(narrow) // capacity))
        )
    return bound


@pytest.mark.parametrize("max_tokens", [512, 1024, 2048, 4096])
def test_bestfit_of_a_real_corpus_is_within_three_rows_of_the_fewest_there_can_be(max_tokens: int) -> None:
    """Padding above 0.1 % at 2048 is what cutting only long documents costs here, no flaw of the packing."""
    _, files = PythonStdlibConfig().root_and_files("train")
    lengths = np.asarray([file.stat().st_size + 1 for file in files])
    starts = np.cumsum(lengths) - lengths
    _, sizes = cut(starts, lengths, max_tokens)
    rows = len(bestfit(starts, lengths, max_tokens).ends)
    assert rows <= fewest_rows(sizes, max_tokens + 1) + 3
