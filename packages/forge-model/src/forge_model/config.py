"""All configuration structs of `[model]` and `[loss]`, to import from one place. Imports no torch.

Each struct is defined beside the part that it configures, in `<part>_config`.
"""

from forge_model.attention.config import AttentionConfig as AttentionConfig
from forge_model.attention.config import GroupedQueryConfig as GroupedQueryConfig
from forge_model.attention.config import LatentConfig as LatentConfig
from forge_model.attention.config import attentions as attentions
from forge_model.attention.rope_config import RopeConfig as RopeConfig
from forge_model.attention.rope_config import ropes as ropes
from forge_model.decoder.block_config import BlockConfig as BlockConfig
from forge_model.decoder.block_config import ResidualBlockConfig as ResidualBlockConfig
from forge_model.decoder.block_config import StandardBlockConfig as StandardBlockConfig
from forge_model.decoder.block_config import blocks as blocks
from forge_model.decoder.config import DecoderConfig as DecoderConfig
from forge_model.decoder.config import LayerConfig as LayerConfig
from forge_model.decoder.config import LayerOverride as LayerOverride
from forge_model.decoder.mtp_config import MTPConfig as MTPConfig
from forge_model.ffn.config import FfnConfig as FfnConfig
from forge_model.ffn.config import MLPConfig as MLPConfig
from forge_model.ffn.config import SwiGLUConfig as SwiGLUConfig
from forge_model.ffn.config import ffns as ffns
from forge_model.loss.config import LossConfig as LossConfig
from forge_model.loss.config import losses as losses
from forge_model.model_config import ComposedConfig as ComposedConfig
from forge_model.model_config import ModelConfig as ModelConfig
from forge_model.model_config import models as models
from forge_model.moe.config import ClampConfig as ClampConfig
from forge_model.moe.config import MoEConfig as MoEConfig
from forge_model.moe.router_config import ExpertChoiceConfig as ExpertChoiceConfig
from forge_model.moe.router_config import RouterConfig as RouterConfig
from forge_model.moe.router_config import SigmoidRouterConfig as SigmoidRouterConfig
from forge_model.moe.router_config import SoftmaxRouterConfig as SoftmaxRouterConfig
from forge_model.moe.router_config import routers as routers
from forge_model.norm_config import LayerNormConfig as LayerNormConfig
from forge_model.norm_config import NormConfig as NormConfig
from forge_model.norm_config import RMSNormConfig as RMSNormConfig
from forge_model.norm_config import norms as norms

__all__ = [
    "AttentionConfig",
    "BlockConfig",
    "ClampConfig",
    "ComposedConfig",
    "DecoderConfig",
    "ExpertChoiceConfig",
    "FfnConfig",
    "GroupedQueryConfig",
    "LatentConfig",
    "LayerConfig",
    "LayerNormConfig",
    "LayerOverride",
    "LossConfig",
    "MLPConfig",
    "MTPConfig",
    "MoEConfig",
    "ModelConfig",
    "NormConfig",
    "RMSNormConfig",
    "ResidualBlockConfig",
    "RopeConfig",
    "RouterConfig",
    "SigmoidRouterConfig",
    "SoftmaxRouterConfig",
    "StandardBlockConfig",
    "SwiGLUConfig",
    "attentions",
    "blocks",
    "ffns",
    "losses",
    "models",
    "norms",
    "ropes",
    "routers",
]
