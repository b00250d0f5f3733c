from .config import DataConfig as DataConfig
from .error import DataError as DataError
from .loader import Loader as Loader
from .loader import MicroBatch as MicroBatch
from .loader import build_loader as build_loader
from .order import Order as Order
from .order import permute as permute
from .sources import SourceConfig as SourceConfig
from .tokenize import tokenize_files as tokenize_files
from .tokenizer import Tokenizer as Tokenizer
from .tokenizer import TokenizerConfig as TokenizerConfig
from .tokenizer import tokenizers as tokenizers
from .tokens import TokenStore as TokenStore
from .tokens import Writer as Writer

__all__ = [
    "DataConfig",
    "DataError",
    "Loader",
    "MicroBatch",
    "Order",
    "SourceConfig",
    "TokenStore",
    "Tokenizer",
    "TokenizerConfig",
    "Writer",
    "build_loader",
    "permute",
    "tokenize_files",
    "tokenizers",
]
