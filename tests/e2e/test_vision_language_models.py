"""Vision-language models of Hugging Face in the real command: in, trained, out; and starts from parts."""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from forge_ckpt.interop.weights import Weights
from forge_data.tokenizer.hf_files import byte_files
from forge_trainer.commands.evaluate import load_model
from forge_trainer.run_dir.files import read_job
from forge_vlm.hf.models import model_from_hf
from runs import losses

transformers = pytest.importorskip("transformers")

JOB = """
[job]
name = "tiny"
root = "{root}"

[model]
type = "vision-language"
{model}

[data]
max_tokens = 96
mask_documents = true
cache_dir = "{cache}"
{tokenizer}

[[data.sources]]
type = "shapes"
samples = 60
held_out = 8

[train]
steps = {steps}
global_batch = 4
micro_batch = 2
init_from = {origin}

[optimizer]
type = "adamw"
lr = {lr}
weight_decay = 0

[schedule]
type = "none"

[checkpoint]
every_steps = {steps}
"""
TEXT = {"vocab_size": 272, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
TOWER = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 3}
TOWER |= {"image_size": 16, "patch_size": 8}
IMAGE = 257


@pytest.fixture
def written(tmp_path):
    def write(name, model, origin, steps=1, lr="1e-30", tokenizer=""):
        path = tmp_path / f"{name}.toml"
        given = {"root": tmp_path / name, "cache": tmp_path / "cache", "tokenizer": tokenizer}
        path.write_text(JOB.format(model=model, origin=origin, steps=steps, lr=lr, **given))
        return path

    return write


def saved(folder, model):
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.1)
    model.eval().save_pretrained(folder)
    return model


def llama(folder):
    return saved(folder, transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT)))


def clip(folder):
    return saved(folder, transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**TOWER)))


def llava(folder):
    """With a tokenizer of bytes that has a token for images."""
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**TEXT),
        vision_config=transformers.CLIPVisionConfig(**TOWER),
        image_token_index=IMAGE,
    )
    model = saved(folder, transformers.LlavaForConditionalGeneration(config))
    files = byte_files(256, 128)
    table = json.loads(files["tokenizer.json"])
    table["added_tokens"].append(table["added_tokens"][0] | {"id": IMAGE, "content": "<image>"})
    for name, text in (files | {"tokenizer.json": json.dumps(table, ensure_ascii=False)}).items():
        (folder / name).write_text(text)
    return model


def picture(folder, size=(16, 16)):
    from PIL import Image

    pixels = np.random.default_rng(1).integers(0, 256, (*size, 3), np.uint8)
    Image.fromarray(pixels).save(folder / "picture.png")
    return folder / "picture.png"


@pytest.mark.slow
def test_llava_is_trained_and_exported_and_transformers_writes_the_same(forge, written, tmp_path):
    from PIL import Image

    llava(tmp_path / "llava")
    own = f'from = "{tmp_path}/llava"'
    tokenizer = f'tokenizer = {{ type = "hf", path = "{tmp_path}/llava", eos = "<|endoftext|>" }}'
    origin = f'"{tmp_path}/llava"'
    forge("train", written("first", own, origin, 2, "1e-3", tokenizer))
    run, out = tmp_path / "first" / "tiny", tmp_path / "out"
    assert "it is a LlavaForConditionalGeneration of transformers" in forge("export", run, out).stdout
    model = transformers.AutoModelForImageTextToText.from_pretrained(out, dtype=torch.float32).eval()
    image_processor = transformers.AutoImageProcessor.from_pretrained(out, backend="pil")
    read = json.loads((out / "processor_config.json").read_text())
    processor = transformers.LlavaProcessor(
        image_processor, transformers.AutoTokenizer.from_pretrained(out), **read
    )
    file, prompt = picture(tmp_path, (20, 16)), "<image>colour? "
    sent = processor(images=Image.open(file), text=prompt, return_tensors="pt")
    with torch.no_grad():
        written_there = model.generate(**sent, max_new_tokens=8, do_sample=False)[0]
    answer = processor.tokenizer.decode(written_there[sent["input_ids"].shape[1] :], skip_special_tokens=True)
    flags = ("--temperature=0", "--max-new-tokens=8")
    said = forge("generate", run, "--image", file, "--prompt", prompt, *flags).stdout
    assert said.rstrip("\n").endswith(answer.rstrip("\n")), (said, answer)
    job = read_job(run)
    ours, step = load_model(job)
    asked = job.model.prompt(prompt, [file.read_bytes()], job.data.tokenizer.build())
    inputs = {name: torch.as_tensor(array) for name, array in asked.inputs.items()}
    with torch.no_grad():
        found, expected = ours(torch.tensor([asked.tokens]), **inputs), model(**sent).logits
    assert step == 2 and found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert "logits differ by" in forge("verify-export", run, out).stdout
    again = f'from = "{out}"'
    forge("train", written("again", again, f'"{out}"', 1, "1e-30", tokenizer))
    assert same_weights(load_model(read_job(tmp_path / "again" / "tiny"))[0], ours)


def same_weights(one, other):
    there = dict(other.named_parameters())
    return there.keys() == dict(one.named_parameters()).keys() and all(
        torch.equal(value, there[name]) for name, value in one.named_parameters()
    )


ENCODER = (
    'encoder = { type = "clip", image_size = 16, patch_size = 8, dim = 24, num_layers = 3, num_heads = 3'
)
ENCODER += ", ffn_dim = 40, layers = -2 }"
FUSIONS = {
    "joint": "{}",
    "cross-attention": '{ type = "cross-attention", layers = "1", max_visual_tokens = 16 }',
    "mixture-of-transformers": '{ type = "mixture-of-transformers" }',
}


@pytest.mark.parametrize("fusion", FUSIONS)
def test_text_of_a_warm_start_is_bit_for_bit_that_of_the_text_model(forge, written, tmp_path, fusion):
    theirs, tower = llama(tmp_path / "text"), clip(tmp_path / "clip")
    model = f'decoder = {{ from = "{tmp_path}/text" }}\n{ENCODER}\nfusion = {FUSIONS[fusion]}'
    origin = f'{{ decoder = "{tmp_path}/text", encoder = "{tmp_path}/clip" }}'
    said = forge("train", written("warm", model, origin)).stdout
    assert "connector" in said.split("tensors are those of")[1], "what is random is told"
    job = read_job(tmp_path / "warm" / "tiny")
    ours, _ = load_model(job)
    assert all(torch.isfinite(one).all() for one in ours.parameters())
    dense = job.model.decoder.build()
    form = job.model.decoder.hugging_face()
    dense.load_state_dict(dict(form.ours(theirs.state_dict())))
    tokens = torch.randint(257, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found, expected = ours(tokens), dense(tokens)
        torch.testing.assert_close(found, theirs(tokens).logits, rtol=0, atol=1e-4)
    assert torch.equal(found, expected)
    if fusion == "mixture-of-transformers":
        for name, value in ours.named_parameters():
            if ".text." in name:
                assert torch.equal(value, ours.get_parameter(name.replace(".text.", ".image."))), name
    pixels = torch.randint(256, (16, 16, 3), dtype=torch.uint8)
    patches = pixels.unflatten(0, (2, 8)).unflatten(2, (2, 8)).transpose(1, 2).reshape(4, -1)
    values = (pixels / 255 - torch.tensor(job.model.encoder.mean)) / torch.tensor(job.model.encoder.std)
    with torch.no_grad():
        states = tower(values.permute(2, 0, 1)[None], output_hidden_states=True).hidden_states
        features = ours.encoder(patches, torch.tensor([[1, 2, 2]]))
    torch.testing.assert_close(features, states[-2][0, 1:], rtol=0, atol=1e-5)


def test_warm_start_from_a_text_run_of_ours_and_weights_that_do_not_fit(forge, written, tiny, tmp_path):
    clip(tmp_path / "clip")
    forge("train", tiny(steps=3, name="text.toml", root=tmp_path / "text"))
    run = tmp_path / "text" / "tiny"
    text = read_job(run).model
    decoder = f"decoder = {{ vocab_size = {text.vocab_size}, max_tokens = 96, dim = {text.dim}, num_layers = "
    heads = f"num_heads = {text.attention.num_heads}, num_kv_heads = {text.attention.kv_heads}"
    decoder += f"{text.num_layers}, attention = {{ {heads} }} }}"
    cross = f"{decoder}\n{ENCODER}\nfusion = {FUSIONS['cross-attention']}"
    origin = f'{{ decoder = "{run}@3", encoder = "{tmp_path}/clip" }}'
    forge("train", written("warm", cross, origin))
    ours, dense = load_model(read_job(tmp_path / "warm" / "tiny"))[0], load_model(read_job(run))[0]
    tokens = torch.randint(text.vocab_size, (2, 24))
    with torch.no_grad():
        assert torch.equal(ours(tokens), dense(tokens))
    for name, change, said in (
        ("wide", ("dim = 24", "dim = 27"), "encoder.dim: 27, there 24"),
        ("deep", (f"num_layers = {text.num_layers},", f"num_layers = {text.num_layers + 1},"), "num_layers"),
    ):
        refused = forge("train", written(name, cross.replace(*change), origin), check=False)
        assert refused.returncode == 78 and said in refused.stderr, refused.stderr
    nowhere = written("nowhere", cross, f'{{ tower = "{tmp_path}/clip" }}')
    refused = forge("train", nowhere, check=False)
    assert refused.returncode == 78 and "are decoder, encoder" in refused.stderr


def test_model_that_no_class_computes_is_exported_into_a_folder_that_starts_another_run(
    forge, written, tmp_path
):
    llama(tmp_path / "text")
    model = (
        f'decoder = {{ from = "{tmp_path}/text" }}\n{ENCODER}\nfusion = {FUSIONS["mixture-of-transformers"]}'
    )
    forge("train", written("first", model, f'{{ decoder = "{tmp_path}/text" }}', 2, "1e-3"))
    run, out = tmp_path / "first" / "tiny", tmp_path / "out"
    said = forge("export", run, out).stdout
    assert (
        "a folder of Forge's own" in said
        and "MixtureOfTransformers" in said
        and Path(out / "config.toml").exists()
    )
    forge("train", written("second", model, f'"{out}"'))
    ours = load_model(read_job(run))[0]
    assert same_weights(load_model(read_job(tmp_path / "second" / "tiny"))[0], ours)
    joint = model.replace(FUSIONS["mixture-of-transformers"], "{}")
    refused = forge("train", written("third", joint, f'"{out}"'), check=False)
    assert refused.returncode == 78 and "weights of another model than [model] describes" in refused.stderr


def mllama(folder):
    text = {**TEXT, "num_hidden_layers": 3, "cross_attention_layers": [1], "pad_token_id": 0}
    vision = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "attention_heads": 3}
    vision |= {"num_global_layers": 1, "intermediate_layers_indices": [1], "vision_output_dim": 48}
    vision |= {"image_size": 16, "patch_size": 8, "max_num_tiles": 2}
    vision |= {"supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]]}
    config = transformers.MllamaConfig(text_config=text, vision_config=vision, image_token_index=272)
    return saved(folder, transformers.MllamaForConditionalGeneration(config))


def with_image_token(folder, number, spelled, bos=True):
    """A tokenizer of bytes with so many ids, of which the last stands for images."""
    files = byte_files(256, 128)
    table = json.loads(files["tokenizer.json"])
    first = table["added_tokens"][0]
    names = {id: f"<unused{id}>" for id in range(257, number)} | {number: spelled}
    table["added_tokens"] += [first | {"id": id, "content": name} for id, name in names.items()]
    told = json.loads(files["tokenizer_config.json"]) | ({"bos_token": "<unused257>"} if bos else {})
    files["tokenizer_config.json"] = json.dumps(told)
    for name, text in (files | {"tokenizer.json": json.dumps(table, ensure_ascii=False)}).items():
        (folder / name).write_text(text)
    return f'tokenizer = {{ type = "hf", path = "{folder}", eos = "<|endoftext|>" }}'


def test_token_of_images_behind_the_vocabulary_is_taken_in_tokenizers_and_in_no_text(
    forge, written, tmp_path
):
    from PIL import Image

    theirs = mllama(tmp_path / "mllama").eval()
    tokenizer = with_image_token(tmp_path / "mllama", 272, "<|image|>")
    own, origin = f'from = "{tmp_path}/mllama"', f'"{tmp_path}/mllama"'
    job = written("one", own, origin, 1, "1e-30", tokenizer)
    forge("train", job)
    run, out = tmp_path / "one" / "tiny", tmp_path / "out"
    assert "without" not in forge("export", run, out).stdout
    processor = transformers.AutoProcessor.from_pretrained(out)
    assert type(processor).__name__ == "MllamaProcessor"
    file = picture(tmp_path, (16, 31))
    with Image.open(file) as opened:
        sent = processor(images=[opened], text="<|image|>colour? ", return_tensors="pt")
    with torch.no_grad():
        given = theirs.generate(**sent, max_new_tokens=8, do_sample=False, use_cache=False)[0]
    answer = processor.tokenizer.decode(given[sent["input_ids"].shape[1] :], skip_special_tokens=True)
    flags = ("--temperature=0", "--max-new-tokens=8")
    prompt = "<image><unused257>colour? "  # as their processor lays it out
    said = forge("generate", run, "--image", file, "--prompt", prompt, *flags).stdout
    assert said.rstrip("\n").endswith(answer.rstrip("\n")) and answer
    refused = forge("generate", run, "--prompt", "a <|image|>", check=False)
    assert "<|image|> is no text for this model" in refused.stderr and "Traceback" not in refused.stderr
    (tmp_path / "book.txt").write_text("a book that tells of <|image|> as it goes. " * 200)
    book = f'type = "files"\npaths = ["{tmp_path}/book.txt"]\nheld_out = 0'
    job.write_text(job.read_text().replace('type = "shapes"\nsamples = 60\nheld_out = 8', book))
    refused = forge("train", job, f"--job.root={tmp_path}/book", check=False)
    assert "has the token 272, and the model embeds 272 ids" in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.parametrize(
    ("spelled", "why"),
    [
        (None, "the token <|image|> in the tokenizer, which has no token of the id"),
        ("<picture>", "the token <|image|> in the tokenizer, which has '<picture>' of the id"),
        ("<|image|>", "a tokenizer with a bos_token"),
    ],
)
def test_export_without_a_processor_that_would_work_says_why(forge, written, tmp_path, spelled, why):
    mllama(tmp_path / "mllama")
    tokenizer = spelled and with_image_token(tmp_path / "mllama", 272, spelled, bos=False)
    own, origin = f'from = "{tmp_path}/mllama"', f'"{tmp_path}/mllama"'
    forge("train", written("one", own, origin, 1, "1e-30", tokenizer or ""))
    said = forge("export", tmp_path / "one" / "tiny", tmp_path / "out").stdout
    assert f"without a processor: that of mllama needs {why}" in said
    assert not list((tmp_path / "out").glob("*processor*"))


LAYOUTS = {
    "pp2": ("--mesh.pp=2",),
    "fsdp2": (),
    "tp2": ("--mesh.tp=2", "--tensor_parallel.sequence=false"),
}
MODELS = {"mllama": mllama, "llava": llava}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_model_of_hugging_face_is_trained_on_two_ranks_as_on_one(forge, written, tmp_path, model, layout):
    MODELS[model](tmp_path / model)
    keys, origin = f'from = "{tmp_path}/{model}"', f'"{tmp_path}/{model}"'
    if model == "mllama":
        keys += '\nfusion = { type = "cross-attention", max_visual_tokens = 64 }'
    paths = [written(name, keys, origin, 3, "1e-2") for name in ("one", "two")]
    forge("train", paths[0], "--train.log_every_steps=1")
    forge("train", paths[1], "--train.log_every_steps=1", *LAYOUTS[layout], ranks=2)
    one, two = (losses(tmp_path / name / "tiny") for name in ("one", "two"))
    assert len(one) == 3 and two == pytest.approx(one, rel=0, abs=3e-5)


@pytest.mark.slow
def test_mllama_is_trained_and_exported(forge, written, tmp_path):
    mllama(tmp_path / "mllama")
    tokenizer = with_image_token(tmp_path / "mllama", 272, "<|image|>")
    model = f'from = "{tmp_path}/mllama"\nfusion = {{ type = "cross-attention", max_visual_tokens = 64 }}'
    forge("train", written("one", model, f'"{tmp_path}/mllama"', 3, "1e-2", tokenizer))
    run, out = tmp_path / "one" / "tiny", tmp_path / "out"
    before, after = (dict(load(of).named_parameters()) for of in (tmp_path / "mllama", run))
    for name in ("fusion.place.weight", "encoder.post_tiles.gate.weight", "connector.project.weight"):
        assert not torch.equal(before[name], after[name]), name
    assert "it is a MllamaForConditionalGeneration of transformers" in forge("export", run, out).stdout
    assert "logits differ by" in forge("verify-export", run, out).stdout
    assert (json.loads((out / "preprocessor_config.json").read_text()))["max_image_tiles"] == 2
    asked = ("--temperature=0", "--max-new-tokens=6", "--prompt")
    wide = ("--image", picture(tmp_path, (16, 40)), *asked, "<image>a")
    assert forge("generate", run, *wide).stdout != forge("generate", run, *asked, "a").stdout


def load(folder):
    """The model of a run, or of a folder of Hugging Face."""
    if not (folder / "config.json").exists():
        return load_model(read_job(folder))[0]
    hf = json.loads((folder / "config.json").read_text())
    config = model_from_hf(hf)
    model, found = config.build(), config.hugging_face().ours(Weights(folder))
    model.load_state_dict(dict(found))
    return model


@pytest.mark.slow
def test_what_the_page_tells_to_type_runs(forge, tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "vision.md").read_text()
    section = page.split("## Train a vision-language model from a text checkpoint")[1].split("\n### ")[0]
    for name, text in re.findall(r"```toml\n# (\S+)\n(.*?)```", section, re.DOTALL):
        (tmp_path / name).write_text(text)
    llama(tmp_path / "hf" / "text")
    clip(tmp_path / "hf" / "clip")
    picture(tmp_path).rename(tmp_path / "a.png")
    (commands,) = re.findall(r"```console\n(.*?)```", section, re.DOTALL)
    typed = [shlex.split(line.removeprefix("$ uv run forge ")) for line in commands.splitlines()]
    assert [words[0] for words in typed] == ["train", "train", "generate", "export", "verify-export"]
    said = [forge(*words, cwd=tmp_path).stdout for words in typed]
    assert "colour?" in said[2] and "it is a LlavaForConditionalGeneration of transformers" in said[3]
    first, second = (dict(load(tmp_path / "runs" / name).named_parameters()) for name in ("first", "second"))
    moved = {name.partition(".")[0] for name, one in first.items() if not torch.equal(one, second[name])}
    assert moved == {"decoder", "connector"} and "logits differ by" in said[4]
