"""Writes references.safetensors and folders: what SAELens 6.54 computes, for test_sae_lens.py.

SAELens needs TransformerLens < 4, where our lock has 4. In an environment of its own:

    uv pip install sae-lens==6.54.12 && python packages/forge-interp/tests/sae_lens/record.py
"""

import json
from pathlib import Path

import torch
from sae_lens import SAE
from sae_lens.registry import get_sae_class, get_sae_training_class
from sae_lens.saes.sae import SAEMetadata, TrainStepInput
from safetensors.torch import save_file

HERE = Path(__file__).parent
D, F, OUT = 6, 12, 5
PLAIN = {"d_in": D, "d_sae": F, "device": "cpu"}
USED = {
    "standard": {},
    "standard_layer_norm": {"normalize_activations": "layer_norm"},
    "standard_rescale": {"normalize_activations": "constant_norm_rescale", "apply_b_dec_to_input": False},
    "topk": {"k": 3},
    "topk_rescaled": {"k": 3, "rescale_acts_by_decoder_norm": True},
    "jumprelu": {},
    "gated": {},
    "transcoder": {"d_out": OUT, "apply_b_dec_to_input": False},
    "skip_transcoder": {"d_out": OUT, "apply_b_dec_to_input": False},
    "jumprelu_transcoder": {"d_out": OUT, "apply_b_dec_to_input": False},
    "jumprelu_skip_transcoder": {"d_out": OUT, "apply_b_dec_to_input": False},
}
TRAINED = {
    "standard": {"l1_coefficient": 0.3},
    "topk": {"k": 3, "aux_loss_coefficient": 0.5},
    "batchtopk": {"k": 2.5, "rescale_acts_by_decoder_norm": False},
    "batchtopk_rescaled": {"k": 2.5},
    "jumprelu": {
        "l0_coefficient": 0.3,
        "jumprelu_bandwidth": 0.5,
        "pre_act_loss_coefficient": 0.2,
        "jumprelu_init_threshold": 0.05,
    },
    "gated": {"l1_coefficient": 0.3},
}


def randomize(sae):
    for name, parameter in sae.named_parameters():
        parameter.data = 0.7 * torch.randn_like(parameter)
        if name == "threshold":
            parameter.data = parameter.data.abs() * 0.3
    return sae


def kind(name):
    for ending in ("_layer_norm", "_rescaled", "_rescale"):
        name = name.removesuffix(ending)
    return name


torch.manual_seed(0)
x = torch.randn(7, D)
dead = torch.arange(F) % 3 == 0
found = {"x": x, "dead": dead}
for name, options in USED.items():
    cls, config = get_sae_class(kind(name))
    sae = randomize(
        cls(config(**PLAIN, **options, metadata=SAEMetadata(hook_name="blocks.0.hook_resid_post")))
    )
    sae.save_model(HERE / name)
    sae = SAE.load_from_disk(HERE / name)
    with torch.no_grad():
        found |= {f"{name}/acts": sae.encode(x), f"{name}/out": sae(x)}
for name, options in TRAINED.items():
    cls, config = get_sae_training_class(kind(name))
    sae = randomize(cls(config(**PLAIN, **options)))
    if kind(name) == "batchtopk":
        sae.topk_threshold.fill_(0.2)
    found |= {f"train/{name}/{key}": value.detach().clone() for key, value in sae.state_dict().items()}
    coefficients = {"l1": 0.3, "l0": 0.3}
    out = sae.training_forward_pass(TrainStepInput(x, coefficients, dead, 1, False))
    out.loss.backward()
    found |= {f"train/{name}/loss": out.loss.detach(), f"train/{name}/acts": out.feature_acts.detach()}
    found |= {f"train/{name}/grad.{key}": p.grad for key, p in sae.named_parameters()}
    if kind(name) == "batchtopk":
        found[f"train/{name}/threshold_after"] = sae.topk_threshold.clone()
        sae.save_inference_model(HERE / f"saved_{name}")
        sae = SAE.load_from_disk(HERE / f"saved_{name}")
        with torch.no_grad():
            found |= {f"saved_{name}/acts": sae.encode(x), f"saved_{name}/out": sae(x)}
save_file({key: value.contiguous().clone() for key, value in found.items()}, HERE / "references.safetensors")
old = json.loads((HERE / "topk" / "cfg.json").read_text())
print(json.dumps(old)[:600])
