"""Published model shapes and the names in their checkpoints. Imports no torch."""

from copy import deepcopy
from typing import Any

from forge_model.hf.families.deepseek import DEEPSEEK_V3 as DEEPSEEK_V3
from forge_model.hf.families.deepseek_v2 import DEEPSEEK_V2 as DEEPSEEK_V2
from forge_model.hf.families.dots1 import DOTS1 as DOTS1
from forge_model.hf.families.family import Family as Family
from forge_model.hf.families.gemma import GEMMA2 as GEMMA2
from forge_model.hf.families.gemma import GEMMA3 as GEMMA3
from forge_model.hf.families.gemma1 import GEMMA as GEMMA
from forge_model.hf.families.glm4 import GLM4 as GLM4
from forge_model.hf.families.glm4_moe import GLM4_MOE as GLM4_MOE
from forge_model.hf.families.gpt2 import GPT2 as GPT2
from forge_model.hf.families.gpt_neox import GPT_NEOX as GPT_NEOX
from forge_model.hf.families.gpt_oss import GPT_OSS as GPT_OSS
from forge_model.hf.families.granite import GRANITE as GRANITE
from forge_model.hf.families.granite import GRANITE_MOE as GRANITE_MOE
from forge_model.hf.families.llama import LLAMA as LLAMA
from forge_model.hf.families.mistral import MISTRAL as MISTRAL
from forge_model.hf.families.moe import MIXTRAL as MIXTRAL
from forge_model.hf.families.moe import OLMOE as OLMOE
from forge_model.hf.families.moe import QWEN3_MOE as QWEN3_MOE
from forge_model.hf.families.olmo import OLMO2 as OLMO2
from forge_model.hf.families.olmo3 import OLMO3 as OLMO3
from forge_model.hf.families.phi3 import PHI3 as PHI3
from forge_model.hf.families.qwen import QWEN2 as QWEN2
from forge_model.hf.families.qwen import QWEN3 as QWEN3
from forge_model.hf.families.qwen2_moe import QWEN2_MOE as QWEN2_MOE
from forge_model.hf.families.smollm3 import SMOLLM3 as SMOLLM3

FAMILIES: tuple[Family, ...] = (
    LLAMA,
    QWEN3,
    QWEN2,
    MISTRAL,
    OLMO2,
    GEMMA,
    GEMMA2,
    GEMMA3,
    MIXTRAL,
    QWEN3_MOE,
    OLMOE,
    DEEPSEEK_V3,
    GPT_OSS,
    OLMO3,
    SMOLLM3,
    GLM4,
    QWEN2_MOE,
    PHI3,
    DOTS1,
    GLM4_MOE,
    GRANITE,
    GRANITE_MOE,
    GPT_NEOX,
    DEEPSEEK_V2,
    GPT2,
)
"""All families, in the order in which export tries them; the first that can hold the model is used."""


def preset(name: str) -> dict[str, Any]:
    """Return the keys of `[model]` of a preset, without `preset` itself.

    Raises:
        ValueError: there is no such preset; lists those that exist.
    """
    for family in FAMILIES:
        if name in family.presets:
            return deepcopy(family.presets[name])
    known = sorted(name for family in FAMILIES for name in family.presets)
    raise ValueError(f"unknown preset {name!r}; known: {', '.join(known)}")


__all__ = [
    "DEEPSEEK_V2",
    "DEEPSEEK_V3",
    "DOTS1",
    "GEMMA",
    "GEMMA2",
    "GEMMA3",
    "GLM4",
    "GLM4_MOE",
    "GPT2",
    "GPT_NEOX",
    "GPT_OSS",
    "GRANITE",
    "GRANITE_MOE",
    "LLAMA",
    "MISTRAL",
    "MIXTRAL",
    "OLMO2",
    "OLMO3",
    "OLMOE",
    "PHI3",
    "QWEN2",
    "QWEN2_MOE",
    "QWEN3",
    "QWEN3_MOE",
    "SMOLLM3",
    "Family",
    "preset",
]
