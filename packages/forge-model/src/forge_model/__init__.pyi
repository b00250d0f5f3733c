from .cache import Cache as Cache
from .decoder import Decoder as Decoder
from .decoder_config import DecoderConfig as DecoderConfig
from .error import ModelError as ModelError
from .generate import Sampling as Sampling
from .generate import generate as generate
from .hf import from_hf as from_hf
from .hf import to_hf as to_hf
from .hf_config import config_from_hf as config_from_hf
from .hf_config import config_to_hf as config_to_hf
from .init import Init as Init
from .init import initialize as initialize
from .loss import Loss as Loss
from .loss import LossTerms as LossTerms
from .loss import Sum as Sum
from .loss_config import LossConfig as LossConfig
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
