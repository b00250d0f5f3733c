from .attention.cache import Cache as Cache
from .decoder.config import DecoderConfig as DecoderConfig
from .decoder.decoder import Decoder as Decoder
from .error import ModelError as ModelError
from .generation.generate import Sampling as Sampling
from .generation.generate import generate as generate
from .hf.config import config_from_hf as config_from_hf
from .hf.config import config_to_hf as config_to_hf
from .hf.tensors import from_hf as from_hf
from .hf.tensors import to_hf as to_hf
from .init import Init as Init
from .init import initialize as initialize
from .loss.config import LossConfig as LossConfig
from .loss.cross_entropy import Loss as Loss
from .loss.cross_entropy import LossTerms as LossTerms
from .loss.cross_entropy import Sum as Sum
from .model_config import ModelConfig as ModelConfig
from .model_config import models as models
from .roles import Role as Role

__all__ = [
    "Cache",
    "Decoder",
    "DecoderConfig",
    "Init",
    "Loss",
    "LossConfig",
    "LossTerms",
    "ModelConfig",
    "ModelError",
    "Role",
    "Sampling",
    "Sum",
    "config_from_hf",
    "config_to_hf",
    "from_hf",
    "generate",
    "initialize",
    "models",
    "to_hf",
]
