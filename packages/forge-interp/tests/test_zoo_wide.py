"""Forty decoders and encoders of transformers that nothing in the package knows by name.

A head edit in `generate()` is exact; extraction has the rows of its samples; an error has a remedy that
works. See `test_families.py` for blocks and attention.
"""

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from forge_interp import ActivationStore, InterpError, ablate, capture, edit, extract_representations

from .families import DECODERS, SLOW, blocks, made
from .zoo import VOCAB, build, text

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize("name", [f"{name}, slow" for name in DECODERS])
def test_a_head_without_its_output_is_the_same_head_in_all_of_generate(name, beams):
    """The last head's channels before the output projection, set to zero by a plain hook."""
    model, inputs = made(name), text(True)
    with torch.no_grad(), capture(model, [f"{block}.**:attn.z" for block in blocks(name, model)]) as acts:
        model(**inputs)
    sites = list(acts)
    heads, width = acts[sites[0]].shape[1], acts[sites[0]].shape[1] * acts[sites[0]].shape[3]

    def remove(module, args):
        z = args[0].clone()
        z[..., width - width // heads :] = 0
        return (z, *args[1:])

    def generated():
        options = {
            "max_new_tokens": 4,
            "output_scores": True,
            "return_dict_in_generate": True,
            "num_beams": beams,
        }
        with torch.no_grad():
            found = model.generate(**inputs, **options, do_sample=False, pad_token_id=0)
        return found.sequences, torch.stack(found.scores)

    handles = []
    for site in sites:
        attention = model.get_submodule(site.partition(":")[0])
        ends = ("o_proj", "out_proj", "dense", "c_proj", "out", "dense_4h")
        projection = [m for n, m in attention.named_modules() if n.split(".")[-1] in ends]
        handles.append(projection[-1].register_forward_pre_hook(remove))
    expected = generated()
    for handle in handles:
        handle.remove()
    plain = generated()
    with edit(model, {site: ablate("zero", (slice(None), heads - 1)) for site in sites}):
        tokens, scores = generated()
    assert tokens.equal(expected[0]) and not scores.equal(plain[1])
    finite = expected[1].isfinite()
    torch.testing.assert_close(scores[finite], expected[1][finite], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SLOW)
def test_extraction_has_the_rows_of_its_samples(name, tmp_path):
    model, site = made(name), blocks(name, made(name))[1]
    tokens = torch.randint(3, VOCAB - 1, (5, 7), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "attention_mask": torch.ones(7, dtype=torch.long)} for row in tokens]
    extract_representations(model, data, [site], tmp_path / "acts", batch_size=2, progress=False)
    with torch.no_grad(), capture(model, site) as acts:
        model(input_ids=tokens, attention_mask=torch.ones_like(tokens))
    store = ActivationStore.open(tmp_path / "acts")
    assert store.sample_id.tolist() == [i for i in range(5) for _ in range(7)]
    assert store.token_id.tolist() == tokens.flatten().tolist()
    expected = acts[site].flatten(0, 1)
    torch.testing.assert_close(store.read(f"{site}:out"), expected, rtol=1e-4, atol=1e-4)


def test_an_error_has_a_remedy_that_works():
    """XLNet takes a softmax over [T, S, B, N] and einsum: refused, and its block outputs are there."""
    config = transformers.XLNetConfig(vocab_size=VOCAB, d_model=32, n_layer=2, n_head=4, d_inner=48)
    model = build("XLNetModel", config, "eager")
    with (
        pytest.raises(InterpError, match="set_attn_implementation"),
        capture(model, "layer.*.**:attn.pattern"),
    ):
        model(**text(False))
    with torch.no_grad(), capture(model, "layer.*:out.0") as acts:
        model(**text(False))
    assert len(acts) == 2
