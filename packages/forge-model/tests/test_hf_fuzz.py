"""Each key of each family set to other values: what `transformers` then computes is computed here or refused.

A family of the registry is covered by being registered; `MORE` has the sizes that a small model of it needs.
"""

import warnings
from collections import Counter
from copy import deepcopy
from math import isqrt

import pytest
import torch
from forge_model import ModelError, config_from_hf, config_to_hf, from_hf
from forge_model.decoder.compare import differences
from forge_model.hf.config import FIXED, HARMLESS
from forge_model.hf.families import FAMILIES
from forge_model.hf.rope import ROPE_KEYS
from like_transformers import Widened, tensors_on_disk

transformers = pytest.importorskip("transformers")

# embeddings of Gemma are multiplied by sqrt(hidden_size), which transformers rounds to float32: 8 is exact
SIZES = {
    "hidden_size": 64, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 61, "max_position_embeddings": 64,
    "sliding_window": 5, "moe_intermediate_size": 12, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "query_pre_attn_scalar": 5, "kv_lora_rank": 10,
    "q_lora_rank": 14, "qk_nope_head_dim": 6, "qk_rope_head_dim": 8, "v_head_dim": 6,
}  # fmt: skip
GROUPS = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
MORE = {
    "deepseek_v2": GROUPS | {"num_key_value_heads": 4, "head_dim": 8, "topk_method": "group_limited_greedy"},
    "deepseek_v3": GROUPS | {"num_key_value_heads": 4, "num_nextn_predict_layers": 0},
    "dots1": GROUPS | {"n_shared_experts": 1},
    "gpt2": {"n_inner": 40},
    "glm4_moe": GROUPS | {"num_nextn_predict_layers": 0},
}
"""Sizes that a family needs beside, or otherwise."""

TEXTS = ["silu", "swish", "gelu", "gelu_pytorch_tanh", "relu", "sigmoid", "swiglu", "float16"]
OTHERS = [0, 1, 2, 8, 0.5, -1.0, True, False, "gelu", "true", [], [0], [1, 0, 1], {}, {"a": 1}, None]
FEW = [1, True, 0.5, "gelu", [0], {"a": 1}]
LISTS = [["full_attention"] * 3, ["sliding_attention"] * 3, ["full_attention"], [0, 2], [1], [1, 0, 1]]
ROPES = [
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 100.0},
    {"rope_type": "yarn", "factor": 2.0, "mscale": 0.7, "mscale_all_dim": 1.3, "rope_theta": 50.0},
    {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.3, "beta_fast": 4, "truncate": False},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 16},
    {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
    {"rope_type": "default", "rope_theta": 30.0},
    {"rope_type": "default", "rope_theta": 30.0, "partial_rotary_factor": 0.5},
    {"rope_theta": 30.0, "factor": 3.0},
    {"type": "linear", "factor": 3.0},
]  # fmt: skip
ROPES += [{"full_attention": one, "sliding_attention": {"rope_theta": 70.0}} for one in ROPES[:2] + ROPES[7:]]
NEVER = {"model_type", "transformers_version"}
"""The first says which family it is."""


def make(family):
    return transformers.models.auto.configuration_auto.CONFIG_MAPPING[family.model_type]


def small(family):
    fields = make(family).__dataclass_fields__.keys() | getattr(make(family), "attribute_map", {}).keys()
    sizes = {name: value for name, value in SIZES.items() if name in fields} | {"pad_token_id": None}
    return sizes | MORE.get(family.model_type, {})


def others(value):
    """Plausible values in the place of one."""
    if isinstance(value, bool):
        found = [not value, int(not value)]
    elif isinstance(value, int):
        found = [value + 1, value * 4, value // 4, value // 2, 0, 1, -1, float(value), float(value) / 3]
    elif isinstance(value, float):
        found = [value * 2, value / 3, 0.0, 1.0, 1, -value]
    elif isinstance(value, str):
        found = TEXTS
    elif isinstance(value, list):
        found = [value[::-1], value[:-1], [*value, *value[-1:]], [], value[1:] + value[:1]]
    else:
        found = []
    return [one for one in [*found, *OTHERS] if one != value or type(one) is not type(value)]


def changes(family, base, form):
    """Pairs of a key and another value: of the class, of its table, and of all that is known here."""
    keys = family.keys | family.old_keys
    named = {*make(family).__dataclass_fields__, *base, *keys, *family.fixed, *family.aliases} - HARMLESS
    for name in sorted((named | FIXED.keys() | ROPE_KEYS | (HARMLESS if form == "saved" else set())) - NEVER):
        value = base.get(name, keys[name].default if name in keys else FIXED.get(name))
        tried = list(others(value)) if name in named else [one for one in FEW if one != value]
        if name in ("rope_parameters", "rope_scaling"):
            tried += ROPES
        elif name in named and (value is None or isinstance(value, list)):
            tried += LISTS
        if name in ("rope_theta", "rope_local_base_freq"):
            tried += [20.0, 500]
        if name == "hidden_size":  # whose square root transformers rounds to float32 for Gemma
            tried = [one for one in tried if not isinstance(one, int) or one <= 0 or isqrt(one) ** 2 == one]
        yield from ((name, one) for one in tried)


def theirs(family, raw):
    """A model of `transformers` of the text of a `config.json`, in float64, weights at random."""
    torch.manual_seed(0)
    config = make(family).from_dict(deepcopy(raw))  # which it changes
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    with Widened():
        model = transformers.AutoModelForCausalLM.from_config(config).to(torch.float64).eval()
    with torch.no_grad():
        buffers = [one for one in model.named_buffers() if one[0].endswith("e_score_correction_bias")]
        for name, tensor in [*model.named_parameters(), *buffers]:
            is_gain = tensor.ndim == 1 and name.endswith("weight")
            tensor.normal_(1.0 if is_gain else 0.0, 0.2)
    return model


def logits_of(model, tokens):
    with torch.no_grad(), Widened():
        return model(tokens, use_cache=False, return_dict=True).logits


def keys_inside(value):
    """The names in a table, and in those within."""
    if not isinstance(value, dict):
        return []
    return [key for name, one in value.items() for key in (name, *keys_inside(one))]


class Ways:
    """What became of each change."""

    def __init__(self):
        self.found, self.counted = [], Counter()

    def note(self, way, name, value, why=""):
        self.counted[way] += 1
        if way in ("silent", "unnamed", "lost"):
            self.found.append(f"{way}: {name} = {value!r} {why}")

    def attempt(self, family, base, name, value, tokens):
        raw = {**base, "model_type": family.model_type, name: value}
        try:
            config = config_from_hf(raw)
        except ModelError as error:
            named = any(one in str(error) for one in (name, *keys_inside(value)))
            return self.note("refused" if named else "unnamed", name, value, str(error)[:200])
        except Exception as error:
            return self.note("silent", name, value, f"{type(error).__name__}: {str(error)[:200]}")
        try:
            model = theirs(family, raw)
            tokens = tokens[:, : config.max_tokens]  # longer ones are refused when they come
            expected = logits_of(model, tokens)
        except Exception as error:
            return self.note("no model", name, value, str(error)[:80])
        try:
            ours = config.build().to(torch.float64)
            loaded = ours.load_state_dict(from_hf(tensors_on_disk(model), config), strict=False)
            assert loaded.missing_keys == (["head.weight"] if config.tie_embeddings else [])
            with torch.no_grad():
                apart = (ours(tokens) - expected).abs().max()
        except ModelError as error:
            return self.note("refused" if name in str(error) else "unnamed", name, value, str(error)[-200:])
        except Exception as error:
            return self.note("silent", name, value, f"{type(error).__name__}: {str(error)[:200]}")
        if not apart <= 1e-9:
            return self.note("silent", name, value, f"logits apart by {apart:.1e}")
        again = differences(config_from_hf(config_to_hf(config)), config)
        return self.note("lost" if again else "equal", name, value, "; ".join(again)[:200])


def cases():
    """Every family by the few keys of a small model, and by all that are saved; one of them is fast."""
    for family in FAMILIES:
        for form in ("bare", "saved"):
            is_fast = (family.model_type, form) == ("olmoe", "bare")
            marks = [] if is_fast else [pytest.mark.slow]
            yield pytest.param(family, form, marks=marks, id=f"{family.model_type}-{form}")


@pytest.mark.parametrize(("family", "form"), list(cases()))
def test_no_key_changes_silently_what_transformers_computes(family, form):
    tokens, ways = torch.randint(7, (1, 20)) * 8, Ways()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers.logging.set_verbosity_error()
        base = small(family)
        if form == "saved":
            base = theirs(family, base).config.to_dict()
        config_from_hf({**base, "model_type": family.model_type})
        for name, value in changes(family, base, form):
            ways.attempt(family, base, name, value, tokens)
    assert not ways.found, "\n".join(map(str, [dict(ways.counted), *ways.found]))
    assert ways.counted["equal"] and ways.counted["refused"], dict(ways.counted)
