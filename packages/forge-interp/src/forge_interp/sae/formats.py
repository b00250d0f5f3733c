"""How are published autoencoders read from a local folder, and ours written?

It reads folders of SAELens (cfg.json, sae_weights.safetensors), of Gemma Scope (params.npz) and of Llama
Scope (hyperparams.json, checkpoints/final.safetensors), each as SAELens 6 does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from forge_interp.errors import InterpError
from forge_interp.extraction.run.parts import dtype_name, dump, replacing
from forge_interp.sae.autoencoder import SAEConfig, SparseAutoencoder

CONFIG, WEIGHTS = "cfg.json", "sae_weights.safetensors"
GEMMA_SCOPE, LLAMA_SCOPE = "params.npz", "hyperparams.json"
_ARCHITECTURES = {  # of SAELens: activation, is a transcoder, has a skip connection
    "standard": ("relu", False, False),
    "topk": ("topk", False, False),
    "batchtopk": ("batch_topk", False, False),
    "jumprelu": ("jumprelu", False, False),
    "gated": ("gated", False, False),
    "transcoder": ("relu", True, False),
    "skip_transcoder": ("relu", True, True),
    "jumprelu_transcoder": ("jumprelu", True, False),
    "jumprelu_skip_transcoder": ("jumprelu", True, True),
}
_Read = tuple[SAEConfig, dict[str, Tensor], float]  # and the factor that the input is multiplied with
_OLD_NAMES = {"hook_point": "hook_name", "hook_point_head_index": "hook_head_index"}
_OLD_NAMES |= {"activation_fn_str": "activation_fn"}
# Keys of configurations: those that say where an autoencoder comes from,
_METADATA = """model_name hook_name hook_layer model_class_name hook_head_index prepend_bos context_size
    exclude_special_tokens model_from_pretrained_kwargs neuronpedia_id seqpos_slice dataset_path hook_name_out
    dataset_trust_remote_code sae_lens_version sae_lens_training_version hook_layer_out hook_head_index_out
    hf_hook_name hf_hook_name_out"""
# those that change no output of a trained one,
_TRAINING = """dtype device normalize_activations decoder_init_norm l1_coefficient lp_norm l1_warm_up_steps
    target_l0 use_sparse_activations aux_loss_coefficient topk_threshold_lr jumprelu_init_threshold
    jumprelu_bandwidth jumprelu_sparsity_loss_mode jumprelu_tanh_scale jumprelu_ste_to_input l0_coefficient
    l0_warm_up_steps pre_act_loss_coefficient"""
# and those of Llama Scope that are used, or change no output.
_LLAMA_SCOPE = """d_model d_sae dataset_average_activation_norm jump_relu_threshold hook_point_in device dtype
    hook_point_out seed expansion_factor exp_name exp_series strict_loading use_decoder_bias lp top_k
    init_decoder_norm decoder_exactly_fixed_norm init_encoder_norm init_encoder_with_decoder_transpose
    k_warmup_steps model_name l1_coefficient l1_coefficient_warmup_steps use_ghost_grads use_batch_norm_mse
    tp_size ddp_size remove_gradient_parallel_to_decoder_directions sparsity_include_decoder_norm
    use_triton_kernel sae_pretrained_name_or_path sparsity_threshold_for_triton_spmm_kernel"""


def load_sae(
    folder: str | Path,
    *,
    transcoder: bool = False,
    norm_factor: float | None = None,
    dtype: torch.dtype | None = None,
    device: Any = None,
) -> SparseAutoencoder:
    """Read an autoencoder or a transcoder from a local folder; nothing is downloaded or unpickled.

    Args:
        folder: a folder that SAELens wrote, or of a Gemma Scope or Llama Scope release.
        transcoder: for Gemma Scope, whose folders do not say it: whether input and output are two sites.
        norm_factor: sqrt(D) / mean |x| of the training data, for a SAELens folder that leaves the scale
            of its input open (`expected_average_only_in`).
        dtype: dtype of the weights; default that of the file.
        device: device of the weights.

    InterpError: the folder is none of these; a key of its configuration is unknown or asks for an unsupported
    computation; weights are missing, too many, or have other shapes.
    """
    folder = Path(folder)
    readers: dict[str, Callable[[], _Read]] = {
        CONFIG: lambda: _sae_lens(folder, norm_factor),
        GEMMA_SCOPE: lambda: _gemma_scope(folder, transcoder),
        LLAMA_SCOPE: lambda: _llama_scope(folder),
    }
    found = next((name for name in readers if (folder / name).is_file()), None)
    if found is None:
        raise InterpError(f"{folder} has none of {', '.join(readers)}; expected a folder of an autoencoder")
    try:
        config, weights, scale = readers[found]()
        sae = SparseAutoencoder(config, dtype=dtype or weights["W_enc"].dtype)
        sae.load_state_dict(weights)
    except InterpError:
        raise
    except (OSError, KeyError, ValueError, TypeError, RuntimeError, SafetensorError) as error:
        raise InterpError(f"{folder} cannot be read ({error}); expected {found} and its weights") from error
    sae.fold_scale(scale)
    return sae.to(device)


def save_sae(sae: SparseAutoencoder, folder: str | Path) -> None:
    """Write the folder format of SAELens 6, which reads it by `SAE.load_from_disk`.

    BatchTopK is written as SAELens does for inference: decoder norms are folded into the encoder, and the
    running threshold makes it a JumpReLU. InterpError for a topk or gated transcoder, which has no format.
    """
    folder, config = Path(folder), sae.config
    architecture = architecture_of(config)
    state = {name: value.detach().cpu() for name, value in sae.state_dict().items()}
    name = config.activation
    if name == "batch_topk":
        norms = sae.W_dec.detach().cpu().norm(dim=-1).clamp_min(1e-8)
        if config.rescale_acts_by_decoder_norm:
            state["W_enc"], state["b_enc"] = state["W_enc"] * norms, state["b_enc"] * norms
            state["W_dec"] = state["W_dec"] / norms[:, None]
        state["threshold"] = torch.full_like(state["b_enc"], state.pop("topk_threshold").item())
        name = "jumprelu"
    names = ["normalize_activations", *_keys_of(name, config.d_out is not None)]
    data: dict[str, Any] = {key: getattr(config, key) for key in names}
    data |= {"architecture": architecture, "device": "cpu", "dtype": dtype_name(sae.W_enc.dtype)}
    data |= {"k": int(config.k or 0)} if name == "topk" else {}  # which torch.topk takes of no other type
    data |= {"metadata": {"sae_lens_version": "6.0.0", **config.metadata}}
    folder.mkdir(parents=True, exist_ok=True)
    written = save({key: value.contiguous() for key, value in state.items()})
    for file_name, content in ((WEIGHTS, written), (CONFIG, dump(data).encode())):
        with replacing(folder / file_name) as file:
            file.write(content)


def architecture_of(config: SAEConfig) -> str:
    """Return the architecture name of SAELens; InterpError if SAELens has no such format."""
    name = "jumprelu" if config.activation == "batch_topk" else config.activation
    wanted = (name, config.d_out is not None, config.skip)
    for architecture, value in _ARCHITECTURES.items():
        if value == wanted:
            return architecture
    raise InterpError(
        f"SAELens has no format for a {name} transcoder; expected relu, jumprelu or batch_topk to save one"
    )


def _keys_of(activation: str, is_transcoder: bool) -> list[str]:
    """Return the fields that a configuration of SAELens shares with ours."""
    names = ["d_in", "d_sae", "apply_b_dec_to_input", "reshape_activations"]
    names += ["d_out"] if is_transcoder else []
    return names + (["k", "rescale_acts_by_decoder_norm"] if activation in ("topk", "batch_topk") else [])


def _sae_lens(folder: Path, norm_factor: float | None) -> _Read:
    data: dict[str, Any] = json.loads((folder / CONFIG).read_text())
    metadata = data.pop("metadata", None) or {}
    version = str(data.get("sae_lens_version") or metadata.get("sae_lens_version") or "")
    data = {_OLD_NAMES.get(key, key): value for key, value in data.items()}
    metadata = {key: data.pop(key) for key in sorted(data.keys() & _METADATA.split())} | metadata
    if not version[:1].isdigit() or int(version.split(".")[0]) < 6:
        _update_old(data, metadata)
    architecture = data.pop("architecture", None)
    if architecture not in _ARCHITECTURES:
        raise InterpError(
            f"{folder / CONFIG}: architecture is {architecture!r}; expected {', '.join(_ARCHITECTURES)}"
        )
    activation, is_transcoder, skip = _ARCHITECTURES[architecture]
    how, scale = data.get("normalize_activations", "none"), 1.0
    if how == "expected_average_only_in":
        if norm_factor is None:
            raise InterpError(
                f"{folder}: the scale of its input is open (normalize_activations is {how!r}); expected "
                "norm_factor=, sqrt(d_in) / mean |x| of the data that it was trained on"
            )
        how, scale = "none", norm_factor
    values: dict[str, Any] = {"normalize_activations": how, "activation": activation, "skip": skip}
    names = _keys_of(activation, is_transcoder)
    values |= {name: data[name] for name in names if name in data}
    _check_keys(folder / CONFIG, data, [*names, *_TRAINING.split()])
    weights = dict(load_file(folder / WEIGHTS))
    if bool((weights.pop("scaling_factor", torch.ones(1)) != 1).any()):
        raise InterpError(f"{folder} has a scaling_factor that is not 1; expected none: fold it into W_dec")
    if "log_threshold" in weights:
        weights["threshold"] = weights.pop("log_threshold").exp()
    return SAEConfig(**values, metadata=metadata), weights, scale


def _update_old(data: dict[str, Any], metadata: Mapping[str, Any]) -> None:
    """Turn a configuration of SAELens 5 or older into version 6, in place (its `handle_pre_6_0_config`)."""
    activation, options = data.pop("activation_fn", "relu"), data.pop("activation_fn_kwargs", None) or {}
    if activation == "topk":
        data |= {"architecture": "topk", "k": options.get("k")}
    elif activation != "relu":
        raise InterpError(f"activation_fn is {activation!r}; expected relu or topk")
    if data.pop("finetuning_scaling_factor", False):
        raise InterpError("finetuning_scaling_factor is true; expected false: fold it into W_dec")
    data.setdefault("architecture", "standard")
    data.setdefault("apply_b_dec_to_input", True)
    is_z = "hook_z" in str(metadata.get("hook_name", ""))
    data.setdefault("reshape_activations", "hook_z" if is_z else "none")
    names = {None: "none", False: "none", True: "expected_average_only_in"}
    how = data.get("normalize_activations")
    data["normalize_activations"] = names.get(how, how)


def _gemma_scope(folder: Path, transcoder: bool) -> _Read:
    with np.load(folder / GEMMA_SCOPE, allow_pickle=False) as file:
        names = {name: name.replace("w_", "W_") for name in file.files}
        weights = {names[name]: torch.from_numpy(file[name]).float() for name in names}
    d_in, d_sae = weights["W_enc"].shape
    d_out = weights["W_dec"].shape[1] if transcoder else None
    return SAEConfig(d_in, d_sae, "jumprelu", d_out, apply_b_dec_to_input=False), weights, 1.0


def _llama_scope(folder: Path) -> _Read:
    path = folder / LLAMA_SCOPE
    data = json.loads(path.read_text())
    meant = {"act_fn": "jumprelu", "norm_activation": "dataset-wise"}
    meant |= dict.fromkeys(("use_glu_encoder", "apply_decoder_bias_to_pre_encoder"), False)
    _check_keys(path, data, [*meant, *_LLAMA_SCOPE.split()])
    wrong = [f"{key} is {data[key]!r}, expected {x!r}" for key, x in meant.items() if data.get(key, x) != x]
    if wrong:
        raise InterpError(f"{path}: {'; '.join(wrong)}: other values are not read")
    names = {"encoder.weight": "W_enc", "decoder.weight": "W_dec"}
    names |= {"encoder.bias": "b_enc", "decoder.bias": "b_dec"}
    read = load_file(folder / "checkpoints" / "final.safetensors")
    weights = {names.get(key, key): x.T.contiguous() if x.ndim == 2 else x for key, x in read.items()}
    scale = data["d_model"] ** 0.5 / data["dataset_average_activation_norm"]["in"]
    weights["threshold"] = torch.full_like(weights["b_enc"], data["jump_relu_threshold"] * scale)
    metadata = {"hook_name": data.get("hook_point_in")}
    sizes = data["d_model"], data["d_sae"], "jumprelu"
    return SAEConfig(*sizes, apply_b_dec_to_input=False, metadata=metadata), weights, scale


def _check_keys(path: Path, data: Mapping[str, Any], known: Collection[str]) -> None:
    if unknown := [f"{key}={data[key]!r:.40}" for key in sorted(data.keys() - set(known))]:
        raise InterpError(
            f"{path} has {', '.join(unknown)}, which may change what it computes; expected known keys only: "
            "delete those that do not"
        )
