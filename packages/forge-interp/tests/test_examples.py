"""Largest activations against a sort of everything, with their texts, as a table and as one page."""

from html.parser import HTMLParser

import pytest
import torch
from forge_interp import ActivationStore, InterpError, extract_representations
from forge_interp.extraction.examples import top_examples
from forge_interp.sae import SAEConfig, SparseAutoencoder
from torch import nn

WIDTH = 6


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(90, WIDTH), nn.Linear(WIDTH, WIDTH))
    random = torch.Generator().manual_seed(1)
    texts = [torch.randint(90, (2 + i % 7,), generator=random) for i in range(30)]
    return extract_representations(
        model, texts, "1", tmp_path_factory.mktemp("acts") / "acts", batch_size=4, progress=False
    )


@pytest.mark.parametrize("block_rows", [1, 13, 4096])
@pytest.mark.parametrize("once", [True, False])
def test_examples_are_the_largest_of_a_sort(store, once, block_rows):
    found = top_examples(store, "1", [4, 1], count=5, once_a_sample=once, block_rows=block_rows)
    rows = store["1"]
    for unit, part in ((4, found[:5]), (1, found[5:])):
        order = rows[:, unit].argsort(descending=True, stable=True).tolist()
        seen, wanted = set(), []
        for row in order:
            if not once or int(store.sample_id[row]) not in seen:
                wanted.append(row)
                seen.add(int(store.sample_id[row]))
        assert [example.row for example in part] == wanted[:5]
        assert [example.value for example in part] == rows[wanted[:5], unit].tolist()


def test_the_context_is_of_the_same_sample(store):
    for example in top_examples(store, "1", count=8, context=(2, 1), decode=lambda i: f"<{i}>"):
        ids = store.token_id[store.sample_id == example.sample].tolist()
        at = example.position
        assert example.tokens == tuple(f"<{i}>" for i in ids[max(0, at - 2) : at + 2])
        assert example.tokens[example.centre] == f"<{ids[at]}>"
        assert example.values[example.centre] == example.value


def test_heads_are_ranked_by_norm_and_features_by_an_autoencoder(store):
    sae = SparseAutoencoder(SAEConfig(WIDTH, 20))
    acts = sae.encode(store["1"]).detach()
    (best,) = top_examples(store, "1", [3], count=1, score=sae.encode)
    assert best.value == pytest.approx(acts[:, 3].max().item()) and best.row == int(acts[:, 3].argmax())
    z = torch.randn(12, 3, 2)
    ids = {"sample_id": torch.arange(12) // 4, "position": torch.arange(12) % 4, "token_id": torch.arange(12)}
    heads = ActivationStore.of({"a:attn.z": z} | ids)
    (best,) = top_examples(heads, "a:attn.z", [2], count=1)
    assert best.row == int(z[:, 2].norm(dim=-1).argmax())


def test_the_table_and_the_page_hold_all_examples(store, tmp_path):
    pytest.importorskip("pandas")
    found = top_examples(store, "1", [0, 2], count=3, decode=lambda i: f" <w{i}>")
    table = found.to_dataframe()
    assert list(table["unit"]) == [0, 0, 0, 2, 2, 2]
    assert list(table["value"]) == [example.value for example in found]
    found.to_html(tmp_path / "page.html", "a & b")

    class Text(HTMLParser):
        def __init__(self):
            super().__init__()
            self.text, self.links = "", []

        def handle_data(self, data):
            self.text += data

        def handle_starttag(self, tag, attrs):
            self.links += [value for name, value in attrs if name in ("src", "href")]

    page = Text()
    page.feed((tmp_path / "page.html").read_text())
    assert "a & b" in page.text and "unit 2" in page.text and not page.links
    assert all("".join(example.tokens) in page.text for example in found)


def test_what_cannot_be_is_refused(store):
    with pytest.raises(InterpError, match=r"units are \[6\], of scores"):
        top_examples(store, "1", [6])
    with pytest.raises(InterpError, match="without pool="):
        top_examples(ActivationStore.of({"a:out": torch.ones(2, 3), "position": torch.tensor([-1, -1])}), "a")
    with pytest.raises(KeyError, match="no such value"):
        top_examples(store, "7")


def test_the_context_is_that_of_neighbouring_rows_where_positions_have_gaps():
    columns = {"x:out": torch.arange(6.0)[:, None], "sample_id": torch.tensor([0, 0, 0, 1, 1, 1])}
    columns |= {"position": torch.tensor([0, 1, 2, 5, 7, 9]), "token_id": torch.arange(10, 16)}
    (found,) = top_examples(ActivationStore.of(columns), "x:out", count=1)
    assert (found.tokens, found.centre, found.values) == (("13", "14", "15"), 2, (3.0, 4.0, 5.0))


def test_scores_that_are_no_numbers_are_refused():
    columns = {"x:out": torch.tensor([[1.0], [float("nan")]]), "sample_id": torch.zeros(2, dtype=torch.long)}
    columns |= {"position": torch.arange(2), "token_id": torch.arange(2)}
    with pytest.raises(InterpError, match="are NaN"):
        top_examples(ActivationStore.of(columns), "x:out")
