"""Pictures hold the numbers that they are given, and refuse what does not fit."""

import base64
import json
import re
import shutil
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
import torch
from forge_interp import InterpError, LayerSimilarity, PatchingTable, read_lens
from forge_interp.pictures import attention_page

WORDS = [["<b>", "\n", " ", "</script>", "a", "b"], ["c", "d", "$x$", "_", "e", "f"]]


def random_patterns(queries: int = 6) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {f"layers.{layer}:attn.pattern": torch.randn(2, 3, queries, 6).softmax(-1) for layer in range(2)}


def data_of(page: str) -> dict:
    (found,) = re.findall(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)
    return json.loads(found)


def test_attention_page_holds_every_weight_and_every_word(tmp_path):
    patterns = random_patterns()
    data = data_of(attention_page(patterns, WORDS, tmp_path / "a.html", title="A & B").read_text())
    assert data["tokens"] == WORDS and data["title"] == "A & B"
    for site in data["sites"]:
        steps = np.frombuffer(base64.b64decode(site["weights"]), "<u2").reshape(site["shape"])
        assert np.abs(steps / 65535 - patterns[site["name"]].double().numpy()).max() < 7.7e-6


def test_attention_page_asks_no_network(tmp_path):
    page = attention_page(random_patterns(), WORDS, tmp_path / "a.html").read_text()
    assert not re.findall(r"https?://|\bsrc=|@import|url\(|fetch\(|<link", page)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x[0], "expected \\[B, N, T, S\\]"),
        (lambda x: x[:1], "2 rows"),
        (lambda x: x[..., :5], "\\[6\\] tokens"),
        (lambda x: x * 3, "weights"),
        (lambda x: x.clone().fill_(torch.nan), "weights"),
    ],
)
def test_attention_page_refuses_what_does_not_fit(tmp_path, change, words):
    with pytest.raises(InterpError, match=words):
        attention_page({"a": change(random_patterns()["layers.0:attn.pattern"])}, WORDS, tmp_path / "a.html")
    with pytest.raises(InterpError, match="no pattern"):
        attention_page({}, WORDS, tmp_path / "a.html")
    assert not (tmp_path / "a.html").exists()


def test_attention_page_refuses_more_than_a_browser_holds(tmp_path):
    pattern = torch.zeros(1).expand(1, 40, 1000, 1000)
    with pytest.raises(InterpError, match="40000000 weights"):
        attention_page({"a": pattern}, [["x"] * 1000], tmp_path / "a.html")


def test_import_of_pictures_needs_no_matplotlib(tmp_path):
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "import torch, forge_interp.pictures as p\n"
        "p.attention_page({'a': torch.ones(1, 1, 1, 1)}, [['x']], 'a.html')\n"
        "try: p.draw_layers(['a'], {'x': [1.0]}, unit='u')\n"
        "except p.attention_page.__globals__['InterpError'] as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert "forge-interp[pictures]" in done.stdout, done.stderr


@pytest.fixture
def draw():
    pytest.importorskip("matplotlib")
    import forge_interp.pictures as pictures

    return pictures


def image_of(figure, axes: int = 0) -> np.ndarray:
    figure.canvas.draw()
    return np.asarray(figure.axes[axes].images[0].get_array())


def labels_of(axis) -> list[str]:
    return [label.get_text() for label in axis.get_ticklabels()]


def test_draw_attention_shows_each_head_with_its_tokens(draw):
    pattern = random_patterns(queries=4)["layers.0:attn.pattern"][0]
    figure = draw.draw_attention(pattern, WORDS[1], columns=2)
    for head in range(3):
        assert np.array_equal(image_of(figure, head), pattern[head].numpy())
    assert labels_of(figure.axes[0].xaxis) == ["c", "d", r"\$x\$", "_", "e", "f"]
    assert labels_of(figure.axes[0].yaxis) == [r"\$x\$", "_", "e", "f"]  # the last four
    with pytest.raises(InterpError, match="of one sequence"):
        draw.draw_attention(pattern[None], WORDS[1])
    with pytest.raises(InterpError, match="with 3 tokens"):
        draw.draw_attention(pattern, WORDS[1][:3])


def table(*shape: int) -> PatchingTable:
    axes = ("site", "position", "head")[: len(shape)]
    labels = tuple(tuple(f"{axis}{i}" for i in range(size)) for axis, size in zip(axes, shape, strict=True))
    values = np.random.default_rng(0).normal(size=shape)
    return PatchingTable(values, axes, labels, clean=2.0, corrupted=0.5)


def test_draw_patching_shows_effects_about_white(draw):
    given = table(3, 5)
    figure = draw.draw_patching(given)
    assert np.allclose(image_of(figure), given.effect)
    low, high = figure.axes[0].images[0].get_clim()
    assert low == -high == -np.abs(given.effect).max()
    assert figure.axes[0].get_xlabel() == "position"
    assert np.allclose(image_of(draw.draw_patching(given, normalized=True)), given.normalized)


def test_draw_patching_has_bars_of_sites_and_panels_of_three_axes(draw):
    bars = draw.draw_patching(table(4)).axes[0].patches
    assert np.allclose([bar.get_width() for bar in bars], table(4).effect)
    given = table(2, 3, 4)
    figure = draw.draw_patching(given)
    assert [figure.axes[i].get_title() for i in range(2)] == ["site0", "site1"]
    assert all(np.allclose(image_of(figure, i), given.effect[i]) for i in range(2))


def lens_result():
    torch.manual_seed(0)
    hidden = {f"layers.{i}:out": torch.randn(2, 6, 7) for i in range(3)}
    targets = torch.randint(7, (2, 6))
    targets[1, -1] = -1
    return read_lens(hidden, lambda site, x: x, targets=targets)


def test_draw_lens_writes_the_likeliest_token_and_colours_a_value(draw):
    result = lens_result()
    figure = draw.draw_lens(result, WORDS[1], row=1, decode=lambda token: f"t{token}")
    shown = image_of(figure)
    expected = result.target_log_prob[:, 1].numpy()
    assert np.array_equal(np.ma.getmaskarray(figure.axes[0].images[0].get_array()), np.isnan(expected))
    assert np.allclose(shown[:, :-1], expected[:, :-1])
    words = [text.get_text() for text in figure.axes[0].texts]
    assert words == [f"t{token}" for token in result.top_ids[:, 1, :, 0].flatten().tolist()]


def test_draw_lens_refuses_a_value_that_is_not_there(draw):
    for value in ("kl", "logits"):
        with pytest.raises(InterpError, match=r"target_log_prob.*entropy"):
            draw.draw_lens(lens_result(), WORDS[1], value=value)
    with pytest.raises(InterpError, match="a row of B"):
        draw.draw_lens(lens_result(), WORDS[1], row=2)
    with pytest.raises(InterpError, match="one label"):
        draw.draw_lens(lens_result(), WORDS[1][:5])


def test_draw_similarity_shows_values_and_leaves_out_what_is_undefined(draw):
    values = np.array([[1.0, -0.1], [np.nan, 0.5]])
    figure = draw.draw_similarity(LayerSimilarity(values, ("a:out", "b"), ("c", "d"), "CKA"))
    assert np.array_equal(np.ma.getmaskarray(figure.axes[0].images[0].get_array()), np.isnan(values))
    assert [text.get_text() for text in figure.axes[0].texts] == ["1.00", "-0.10", "nan", "0.50"]
    assert labels_of(figure.axes[0].yaxis) == ["a", "b"]
    assert figure.axes[0].images[0].get_clim() == (-0.1, 1.0)


def test_draw_layers_shows_means_of_repeats(draw):
    figure = draw.draw_layers(["a:out", "b:out"], {"x": [[1, 3], [2, 6]], "y": [0, 1]}, unit="R2", chance=0.5)
    assert [line.get_ydata().tolist() for line in figure.axes[0].lines[:1]] == [[2.0, 4.0]]
    assert figure.axes[0].get_ylabel() == "R2" and labels_of(figure.axes[0].xaxis) == ["a", "b"]
    with pytest.raises(InterpError, match="curve 'x' has shape"):
        draw.draw_layers(["a"], {"x": [1, 2]}, unit="R2")


def test_draw_sweep_sorts_the_strengths(draw):
    figure = draw.draw_sweep([2, -2, 0], {"word": [5.0, 1.0, 3.0]}, unit="nats")
    line = figure.axes[0].lines[0]
    assert line.get_xdata().tolist() == [-2, 0, 2] and line.get_ydata().tolist() == [1, 3, 5]
    with pytest.raises(InterpError, match="expected \\[3\\]"):
        draw.draw_sweep([2, -2, 0], {"word": [5.0]}, unit="nats")


CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_attention_page_in_a_browser_shows_the_weights_that_the_address_asks_for(tmp_path):
    patterns = random_patterns(queries=4)
    page = attention_page(patterns, WORDS, tmp_path / "a.html", title="<i>Two</i>")
    browser = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
    address = f"file://{page}#1/1/2/3"
    done = subprocess.run([*browser, "--dump-dom", address], capture_output=True, text=True, timeout=120)
    shown = [float(weight) for weight in re.findall(r'data-weight="([\d.]+)"', done.stdout)]
    assert np.allclose(shown, patterns["layers.1:attn.pattern"][1, 2, 3].numpy(), atol=1e-5)
    assert 'aria-pressed="true"' in done.stdout and "&lt;i&gt;Two&lt;/i&gt;" in done.stdout
    assert len(re.findall(r"head \d</button>", done.stdout)) == 3

    shot = tmp_path / "a.png"
    command = [*browser, "--window-size=390,1200", f"--screenshot={shot}", address]
    subprocess.run(command, capture_output=True, timeout=120, check=True)
    assert darkest(shot) < 200  # a map was drawn


def darkest(path) -> int:
    """The least byte of the rows of a PNG that are not filtered away: 255 throughout is an empty page."""
    data = path.read_bytes()
    assert struct.unpack(">II", data[16:24]) == (390, 1200)
    chunks, at = b"", 8
    while at < len(data):
        (size,) = struct.unpack(">I", data[at : at + 4])
        if data[at + 4 : at + 8] == b"IDAT":
            chunks += data[at + 8 : at + 8 + size]
        at += size + 12
    return min(zlib.decompress(chunks))
