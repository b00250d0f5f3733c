"""Autoencoders against what SAELens 6 computes (recorded by sae_lens/record.py)."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from forge_interp import InterpError
from forge_interp.sae import SAEConfig, SparseAutoencoder, load_sae, save_sae
from forge_interp.sae.activations import Penalty
from forge_interp.sae.training import forward
from safetensors.torch import load_file, save_file

LENS = Path(__file__).parent / "sae_lens"
REFERENCE = load_file(LENS / "references.safetensors")
USED = sorted({key.split("/")[0] for key in REFERENCE if key.endswith("/out")})
D, F = 6, 12
CLOSE = {"rtol": 1e-6, "atol": 1e-6}


@pytest.mark.parametrize("name", USED)
def test_load_sae_computes_what_sae_lens_computes(name):
    sae, x = load_sae(LENS / name), REFERENCE["x"]
    torch.testing.assert_close(sae.encode(x), REFERENCE[f"{name}/acts"], **CLOSE)
    torch.testing.assert_close(sae(x), REFERENCE[f"{name}/out"], **CLOSE)


@pytest.mark.parametrize("name", USED)
def test_save_sae_writes_what_load_sae_reads_bit_by_bit(name, tmp_path):
    sae = load_sae(LENS / name)
    if sae.config.k is not None:  # as a TOML file may have it
        sae.config = replace(sae.config, k=float(sae.config.k))
    save_sae(sae, tmp_path)
    again, x = load_sae(tmp_path), REFERENCE["x"]
    assert again(x).equal(sae(x))
    wanted = json.loads((LENS / name / "cfg.json").read_text())
    found = json.loads((tmp_path / "cfg.json").read_text())
    assert isinstance(found.get("k", 1), int)
    assert {key: found[key] for key in wanted if key != "metadata"} == {
        key: value for key, value in wanted.items() if key != "metadata"
    }


TRAINED = {
    "standard": (SAEConfig(D, F), Penalty(0.3)),
    "topk": (SAEConfig(D, F, "topk", k=3, rescale_acts_by_decoder_norm=True), Penalty(auxiliary=0.5)),
    "batchtopk": (SAEConfig(D, F, "batch_topk", k=2.5), Penalty()),
    "batchtopk_rescaled": (
        SAEConfig(D, F, "batch_topk", k=2.5, rescale_acts_by_decoder_norm=True),
        Penalty(),
    ),
    "jumprelu": (SAEConfig(D, F, "jumprelu"), Penalty(0.3, bandwidth=0.5, pre_act=0.2)),
    "gated": (SAEConfig(D, F, "gated"), Penalty(0.3)),
}


def trained(name):
    sae = SparseAutoencoder(TRAINED[name][0])
    sae.load_state_dict({key: REFERENCE[f"train/{name}/{key}"] for key in sae.state_dict()})
    return sae


@pytest.mark.parametrize("name", TRAINED)
def test_loss_and_gradients_of_a_training_step_are_those_of_sae_lens(name):
    sae, x = trained(name), REFERENCE["x"]
    batch = forward(sae, (x, x), REFERENCE["dead"], TRAINED[name][1], lambda values: values)
    errors = (batch.output - x).square().sum(-1)
    loss = (errors + sae.activation.losses(sae, batch, TRAINED[name][1])).mean()
    loss.backward()
    torch.testing.assert_close(batch.acts, REFERENCE[f"train/{name}/acts"], **CLOSE)
    torch.testing.assert_close(loss, REFERENCE[f"train/{name}/loss"], **CLOSE)
    for key, parameter in sae.named_parameters():
        wanted = REFERENCE[f"train/{name}/grad.{key}"]
        found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(
            found, wanted, rtol=2e-5, atol=2e-6, msg=lambda text, key=key: f"{key}: {text}"
        )
    if "batchtopk" in name:
        after = REFERENCE[f"train/{name}/threshold_after"]
        torch.testing.assert_close(sae.topk_threshold, after, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["batchtopk", "batchtopk_rescaled"])
def test_batch_topk_is_saved_as_sae_lens_saves_it(name, tmp_path):
    sae, x = trained(name), REFERENCE["x"]
    sae.topk_threshold.copy_(REFERENCE[f"train/{name}/threshold_after"])
    save_sae(sae, tmp_path)
    again = load_sae(tmp_path)
    assert again.config.activation == "jumprelu"
    torch.testing.assert_close(again.encode(x), REFERENCE[f"saved_{name}/acts"], **CLOSE)
    torch.testing.assert_close(again(x), REFERENCE[f"saved_{name}/out"], **CLOSE)
    torch.testing.assert_close(sae(x), again(x), **CLOSE)


def numpy_jumprelu(x, w):
    """The formulas of the Gemma Scope paper (arXiv:2408.05147, eq. 1-3), in float64."""
    pre = x @ w["W_enc"] + w["b_enc"]
    acts = np.where(pre > w["threshold"], np.maximum(pre, 0), 0)
    return acts, acts @ w["W_dec"] + w["b_dec"]


def gemma_scope(folder, d_out=D, lower=False):
    rng = np.random.default_rng(0)
    shapes = {"W_enc": (D, F), "W_dec": (F, d_out), "b_enc": (F,), "b_dec": (d_out,), "threshold": (F,)}
    weights = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    weights["threshold"] = np.abs(weights["threshold"]) * 0.5
    np.savez(folder / "params.npz", **{k.lower() if lower else k: v for k, v in weights.items()})
    return weights


@pytest.mark.parametrize("transcoder", [False, True])
def test_gemma_scope_folder_is_read(tmp_path, transcoder):
    weights = gemma_scope(tmp_path, 5 if transcoder else D, lower=transcoder)
    sae, x = load_sae(tmp_path, transcoder=transcoder), REFERENCE["x"]
    acts, out = numpy_jumprelu(x.double().numpy(), weights)
    np.testing.assert_allclose(sae.encode(x).detach(), acts, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(sae(x).detach(), out, rtol=1e-5, atol=1e-6)


def llama_scope(folder, **changes):
    torch.manual_seed(3)
    weights = {
        "encoder.weight": torch.randn(F, D),
        "encoder.bias": torch.randn(F),
        "decoder.weight": torch.randn(D, F),
        "decoder.bias": torch.randn(D),
    }
    (folder / "checkpoints").mkdir(parents=True)
    save_file(weights, folder / "checkpoints" / "final.safetensors")
    data = {
        "d_model": D,
        "d_sae": F,
        "act_fn": "jumprelu",
        "jump_relu_threshold": 0.4,
        "norm_activation": "dataset-wise",
        "dataset_average_activation_norm": {"in": 5.0, "out": 5.0},
        "hook_point_in": "blocks.0.hook_resid_post",
        "use_glu_encoder": False,
    }
    (folder / "hyperparams.json").write_text(json.dumps(data | changes))
    return weights


def test_llama_scope_folder_is_read_as_sae_lens_reads_it(tmp_path):
    weights = llama_scope(tmp_path)
    sae, x = load_sae(tmp_path), REFERENCE["x"]
    scale = D**0.5 / 5.0
    pre = scale * x @ weights["encoder.weight"].T + weights["encoder.bias"]
    acts = pre * (pre > 0.4 * scale)
    torch.testing.assert_close(sae.encode(x), acts, **CLOSE)
    made = (acts @ weights["decoder.weight"].T + weights["decoder.bias"]) / scale
    torch.testing.assert_close(sae(x), made, **CLOSE)


def test_a_value_of_llama_scope_that_is_not_computed_is_refused(tmp_path):
    llama_scope(tmp_path, use_glu_encoder=True)
    with pytest.raises(InterpError, match="use_glu_encoder is True, expected False"):
        load_sae(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fancy": 3}, r"has fancy=3, which may change"),
        ({"architecture": "temporal"}, "architecture is 'temporal'"),
        (
            {"normalize_activations": "covariance_whitening"},
            "normalize_activations is 'covariance_whitening'",
        ),
        ({"normalize_activations": "expected_average_only_in"}, "norm_factor="),
        ({"d_sae": 11}, r"size mismatch for W_enc"),
        ({"k": 3}, "has k=3"),
    ],
)
def test_a_configuration_that_is_not_understood_is_refused(tmp_path, changes, message):
    folder = shutil.copytree(LENS / "jumprelu", tmp_path / "sae")
    data = json.loads((folder / "cfg.json").read_text())
    (folder / "cfg.json").write_text(json.dumps(data | changes))
    with pytest.raises(InterpError, match=message):
        load_sae(folder)


def test_an_open_scale_is_folded(tmp_path):
    folder = shutil.copytree(LENS / "jumprelu", tmp_path / "sae")
    data = json.loads((folder / "cfg.json").read_text())
    (folder / "cfg.json").write_text(json.dumps(data | {"normalize_activations": "expected_average_only_in"}))
    plain, folded, x = load_sae(LENS / "jumprelu"), load_sae(folder, norm_factor=2.5), REFERENCE["x"]
    torch.testing.assert_close(folded(x), plain(2.5 * x) / 2.5, **CLOSE)


def test_a_configuration_of_sae_lens_5_is_read(tmp_path):
    folder = shutil.copytree(LENS / "topk", tmp_path / "sae")
    data = {
        "architecture": "standard",
        "d_in": D,
        "d_sae": F,
        "dtype": "float32",
        "device": "cpu",
        "model_name": "gpt2",
        "hook_point": "blocks.0.hook_resid_post",
        "hook_layer": 0,
        "activation_fn_str": "topk",
        "activation_fn_kwargs": {"k": 3},
        "apply_b_dec_to_input": True,
        "finetuning_scaling_factor": False,
        "normalize_activations": None,
        "sae_lens_training_version": "5.1.0",
    }
    (folder / "cfg.json").write_text(json.dumps(data))
    sae, x = load_sae(folder), REFERENCE["x"]
    torch.testing.assert_close(sae(x), REFERENCE["topk/out"], **CLOSE)
    assert sae.config.metadata["hook_name"] == "blocks.0.hook_resid_post"


def test_hook_z_takes_heads_and_gives_them_back(tmp_path):
    folder = shutil.copytree(LENS / "standard", tmp_path / "sae")
    data = json.loads((folder / "cfg.json").read_text())
    (folder / "cfg.json").write_text(json.dumps(data | {"reshape_activations": "hook_z"}))
    sae, x = load_sae(folder), REFERENCE["x"]
    heads = x.unflatten(-1, (2, 3))
    assert sae(heads).equal(sae(x).unflatten(-1, (2, 3)))
    torch.testing.assert_close(sae(x), REFERENCE["standard/out"], **CLOSE)


def test_errors_say_what_is_wrong(tmp_path):
    with pytest.raises(InterpError, match=r"has none of cfg\.json, params\.npz, hyperparams"):
        load_sae(tmp_path)
    (tmp_path / "cfg.json").write_text("{")
    with pytest.raises(InterpError, match="cannot be read"):
        load_sae(tmp_path)
    with pytest.raises(InterpError, match=r"activation is 'tanh'.*k is 3.*skip is True"):
        SAEConfig(D, F, "tanh", k=3, skip=True)
    with pytest.raises(InterpError, match="k is None; expected 1 to d_sae=12"):
        SAEConfig(D, F, "topk")
    with pytest.raises(InterpError, match=r"shape \[2, 5\]; expected d_in=6"):
        SparseAutoencoder(SAEConfig(D, F))(torch.randn(2, 5))
    with pytest.raises(InterpError, match="needs its input"):
        load_sae(LENS / "skip_transcoder").decode(torch.zeros(1, F))
    topk = SAEConfig(D, F, "topk", 5, k=2, apply_b_dec_to_input=False)
    with pytest.raises(InterpError, match="no format for a topk transcoder"):
        save_sae(SparseAutoencoder(topk), tmp_path)
