from .config import DataConfig as DataConfig
from .error import DataError as DataError
from .loading.loader import Loader as Loader
from .loading.loader import MicroBatch as MicroBatch
from .loading.loader import build_loader as build_loader
from .order.order import Order as Order
from .order.order import permute as permute
from .sources.config import SourceConfig as SourceConfig
from .store.tokenize import tokenize_files as tokenize_files
from .store.tokens import TokenStore as TokenStore
from .store.tokens import Writer as Writer
from .tokenizer.tokenizer import Tokenizer as Tokenizer
from .tokenizer.tokenizer import TokenizerConfig as TokenizerConfig
from .tokenizer.tokenizer import tokenizers as tokenizers

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
