from .config import VisionLanguageConfig as VisionLanguageConfig
from .connectors.config import ConnectorConfig as ConnectorConfig
from .connectors.config import connectors as connectors
from .encoders.config import EncoderConfig as EncoderConfig
from .encoders.config import encoders as encoders
from .fusion.config import FusionConfig as FusionConfig
from .fusion.config import fusions as fusions
from .model import VisionLanguage as VisionLanguage

__all__ = [
    "ConnectorConfig",
    "EncoderConfig",
    "FusionConfig",
    "VisionLanguage",
    "VisionLanguageConfig",
    "connectors",
    "encoders",
    "fusions",
]
