"""Checkpoints of torch DCP come in bit for bit, and nothing that lies in their pickles is executed."""

import importlib.util
import io
import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forge_ckpt import CheckpointError, DamagedError, UnsupportedError, Weights
from forge_ckpt.cli import main
from forge_ckpt.interop.dcp import Chunk, DcpTensors, Described, Values

HERE = Path(__file__).parent
OLD = HERE / "fixtures" / "dcp-torch-2.11"


def load_writer():
    spec = importlib.util.spec_from_file_location("dcp_write", HERE / "dcp_write.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


WRITER = load_writer()
SIZES = {
    "hidden_size": WRITER.DIM,
    "num_attention_heads": WRITER.HEADS,
    "num_key_value_heads": WRITER.KEY_HEADS,
    "num_hidden_layers": 2,
    "intermediate_size": WRITER.WIDE,
    "vocab_size": WRITER.VOCAB,
}


@pytest.fixture(scope="module")
def new(tmp_path_factory):
    """The same checkpoint, written by the torch that is installed."""
    folder = tmp_path_factory.mktemp("dcp") / "new"
    subprocess.run([sys.executable, str(HERE / "dcp_write.py"), str(folder)], check=True, timeout=280)
    return folder


@pytest.fixture(params=["torch 2.11", pytest.param("torch that is installed", marks=pytest.mark.slow)])
def folder(request):
    return OLD if request.param == "torch 2.11" else request.getfixturevalue("new")


@pytest.fixture
def copy(tmp_path):
    return Path(shutil.copytree(OLD, tmp_path / "copy"))


def test_every_tensor_is_what_was_saved(folder):
    found = DcpTensors(folder)
    expected = WRITER.weights() | {f"extra.{name}": value for name, (value, _) in WRITER.others().items()}
    named, left = found.weights()
    assert named.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name
    assert len(left) == len(expected) + 2 and {"note", "train_state.step"} <= {*left}
    assert len(found.tensors["extra.two"].chunks) == 2  # the third rank holds nothing


def test_import_writes_a_llama_that_transformers_computes_as_torchtitan_does(folder, tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    config = SIZES | {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    slim = Path(shutil.copytree(folder, tmp_path / "slim"))
    out = tmp_path / "hf"
    arguments = ["import", str(slim), str(out), "--llama", str(tmp_path / "config.json")]
    assert main(arguments) == 2 and "extra." in capsys.readouterr().err  # not of a Llama: refused
    forget(slim, "extra.")
    assert main(arguments) == 0 and "left out 30" in capsys.readouterr().out
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float64)
    tokens = torch.tensor([[1, 5, 2, 10, 3]])
    with torch.no_grad():
        apart = (model(tokens).logits - titan(WRITER.weights(), tokens)).abs().max()
    assert apart < 1e-5  # norms and rotations of transformers are float32; logits reach 7


@pytest.mark.parametrize(
    ("change", "needle"),
    [
        ({"num_key_value_heads": 2}, "k_proj"),
        ({"num_attention_heads": 4}, "k_proj"),
        ({"num_attention_heads": 4, "head_dim": 4}, "q_proj"),
        ({"num_hidden_layers": 3}, "num_hidden_layers = 3"),
        ({"vocab_size": 99}, "vocab_size = 99"),
        ({"hidden_size": 16}, "hidden_size = 16"),
        ({"intermediate_size": 21}, "intermediate_size = 21"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
    ],
)
def test_import_with_the_config_of_another_llama_is_refused(folder, tmp_path, capsys, change, needle):
    slim = Path(shutil.copytree(folder, tmp_path / "slim"))
    forget(slim, "extra.")
    path, out = tmp_path / "config.json", tmp_path / "hf"
    path.write_text(json.dumps(SIZES | change))
    arguments = ["import", str(slim), str(out), "--llama", str(path)]
    assert main(arguments) == 2 and needle in capsys.readouterr().err
    assert not out.exists()
    path.write_text(json.dumps(SIZES))
    assert main(arguments) == 0


@pytest.mark.parametrize("value", ["8", None, [8], {}, 8.0, -8, 0, True, float("nan")])
@pytest.mark.parametrize("key", [*SIZES, "head_dim"])
def test_import_with_a_size_that_is_no_number_is_refused(copy, tmp_path, capsys, key, value):
    forget(copy, "extra.")
    path, out = tmp_path / "config.json", tmp_path / "hf"
    path.write_text(json.dumps(SIZES | {key: value}))
    code = main(["import", str(copy), str(out), "--llama", str(path)])
    if value is None and key in ("num_key_value_heads", "head_dim"):  # as many as heads; hidden_size / heads
        assert "k_proj" in capsys.readouterr().err if key == "num_key_value_heads" else code == 0
    else:
        told = capsys.readouterr().err
        assert code == 2 and f"{key} = {value!r}; expected" in told and not out.exists(), told


def titan(weights, tokens):
    """Logits of torchtitan's Llama 3 in float64, written from its description: neighbours are rotated."""
    w = {name: value.double() for name, value in weights.items()}
    heads, key_heads, size = WRITER.HEADS, WRITER.KEY_HEADS, WRITER.DIM // WRITER.HEADS
    x = w["tok_embeddings.weight"][tokens]
    angles = torch.outer(
        torch.arange(tokens.shape[1]).double(), 10000.0 ** (-torch.arange(0, size, 2).double() / size)
    )
    turn = torch.polar(torch.ones_like(angles), angles)[None, :, None]

    def norm(x, gain):
        return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * gain

    def rotated(x):
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turn).flatten(-2)

    for layer in range(2):
        own = {
            k.removeprefix(f"layers.{layer}."): v for k, v in w.items() if k.startswith(f"layers.{layer}.")
        }
        h = norm(x, own["attention_norm.weight"])
        q = rotated((h @ own["attention.wq.weight"].T).unflatten(-1, (heads, size)))
        k = rotated((h @ own["attention.wk.weight"].T).unflatten(-1, (key_heads, size)))
        v = (h @ own["attention.wv.weight"].T).unflatten(-1, (key_heads, size))
        k, v = (one.repeat_interleave(heads // key_heads, 2) for one in (k, v))
        mixed = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        x = x + mixed.transpose(1, 2).flatten(2) @ own["attention.wo.weight"].T
        h = norm(x, own["ffn_norm.weight"])
        gate = torch.nn.functional.silu(h @ own["feed_forward.w1.weight"].T)
        x = x + (gate * (h @ own["feed_forward.w3.weight"].T)) @ own["feed_forward.w2.weight"].T
    return norm(x, w["norm.weight"]) @ w["output.weight"].T


def forget(folder, prefix):
    """Take what begins with a prefix out of the metadata, with torch's own classes."""
    found = pickle.loads((folder / ".metadata").read_bytes())
    for name in [name for name in found.state_dict_metadata if name.startswith(prefix)]:
        del found.state_dict_metadata[name]
    (folder / ".metadata").write_bytes(pickle.dumps(found))


def test_import_under_a_prefix_keeps_names_and_refuses_an_optimizer(tmp_path, capsys):
    assert main(["import", str(OLD), str(tmp_path / "out"), "--prefix", "layers.0.", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["tensors"] == 9 and "norm.weight" in told["left_out"]
    kept = Weights(tmp_path / "out")["attention.wq.weight"]
    assert torch.equal(kept, WRITER.weights()["layers.0.attention.wq.weight"])
    assert main(["import", str(OLD), str(tmp_path / "no"), "--prefix", "optimizer.state."]) == 2
    assert "state of an optimizer is not taken over" in capsys.readouterr().err
    assert main(["import", str(OLD), str(tmp_path / "no"), "--prefix", "none."]) == 2
    assert main(["import", str(tmp_path), str(tmp_path / "no")]) == 2
    assert not (tmp_path / "no").exists()


class Evil:
    def __init__(self, function, *arguments):
        self.made = function, arguments

    def __reduce__(self):
        return self.made


@pytest.mark.parametrize("function", [os.system, eval, exec, getattr, bytearray, io.open])
def test_nothing_that_a_pickle_names_is_executed(copy, tmp_path, function):
    proof = tmp_path / "proof"
    (copy / ".metadata").write_bytes(pickle.dumps(Evil(function, f"open({str(proof)!r}, 'w')")))
    with pytest.raises(UnsupportedError, match="which no checkpoint of tensors needs"):
        DcpTensors(copy)
    assert not proof.exists()


def test_nothing_that_the_pickle_of_a_tensor_names_is_executed(copy, tmp_path):
    found = pickle.loads((copy / ".metadata").read_bytes())
    index, place = next((i, p) for i, p in found.storage_data.items() if i.fqn == "norm.weight")
    path, written = copy / place.relative_path, io.BytesIO()
    torch.save(Evil(os.system, f"touch {tmp_path / 'proof'}"), written)
    found.storage_data[index].offset, found.storage_data[index].length = (
        path.stat().st_size,
        len(written.getvalue()),
    )
    with path.open("ab") as file:
        file.write(written.getvalue())
    (copy / ".metadata").write_bytes(pickle.dumps(found))
    with pytest.raises(UnsupportedError, match=r"it names \w+.system"):
        DcpTensors(copy)
    assert not (tmp_path / "proof").exists()


def test_a_pickle_that_asks_for_much_memory_is_refused(copy):
    # BYTEARRAY8 with a size of 1 TB; LONG_BINPUT far out; a tuple doubled again and again
    for data in (
        b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b".",
        b"\x80\x04Nr\xff\xff\xff\x7f.",
        b"\x80\x04]" + b"q\x00h\x00h\x00\x86" * 3 + b".",
        b"\x80\x04" + b"(" * 10_000_000 + b".",
    ):
        (copy / ".metadata").write_bytes(data)
        with pytest.raises(UnsupportedError):
            DcpTensors(copy)


def test_flipped_bits_cut_and_lost_files_are_found(copy):
    path = copy / "__1_0.distcp"
    data = path.read_bytes()
    place = data.index(WRITER.weights()["layers.1.feed_forward.w1.weight"][7:14].numpy().tobytes())
    path.write_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
    found = DcpTensors(copy)
    assert torch.equal(found["norm.weight"], WRITER.weights()["norm.weight"])
    with pytest.raises(DamagedError, match="is damaged between bytes"):
        found["layers.1.feed_forward.w1.weight"]
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError):
        DcpTensors(copy)
    path.write_bytes(data)
    found = DcpTensors(copy)
    path.unlink()
    with pytest.raises(DamagedError, match="is missing"):
        found["layers.1.feed_forward.w1.weight"]
    with pytest.raises(UnsupportedError, match="No such file"):
        DcpTensors(copy)


@pytest.mark.parametrize("name", ["../copy/__0_0.distcp", "/etc/passwd", "link", "", ".."])
def test_files_elsewhere_are_not_read(copy, name):
    (copy / "link").symlink_to("/etc/passwd")
    found = pickle.loads((copy / ".metadata").read_bytes())
    for place in found.storage_data.values():
        place.relative_path = name
    (copy / ".metadata").write_bytes(pickle.dumps(found))
    with pytest.raises(UnsupportedError):
        DcpTensors(copy)


def test_a_tensor_of_more_elements_than_it_stores_is_refused():
    size = (1 << 40,)
    values = Values("float32", offset=0, size=size, stride=(0,), crc=0, first=0, bytes=4)
    with pytest.raises(CheckpointError, match="has more elements than its storage"):
        Described("float32", size, [Chunk((0,), size, "x", values)]).check("w")


@pytest.mark.parametrize("change", ["size", "chunk", "lost", "dtype", "offset", "transformed"])
def test_what_does_not_make_up_a_tensor_is_refused(copy, change):
    found = pickle.loads((copy / ".metadata").read_bytes())
    tensor = found.state_dict_metadata["output.weight"]
    stored = next(place for index, place in found.storage_data.items() if index.fqn == "output.weight")
    if change == "size":
        tensor.size = torch.Size([12, 8])
    elif change == "chunk":
        tensor.chunks[1].sizes = torch.Size([5, 8])
    elif change == "lost":
        tensor.chunks.pop()
    elif change == "dtype":
        tensor.properties.dtype = torch.float64
    elif change == "offset":
        stored.offset += 1
    else:
        stored.transform_descriptors = ["zstd"]
    (copy / ".metadata").write_bytes(pickle.dumps(found))
    with pytest.raises(UnsupportedError):
        DcpTensors(copy)
