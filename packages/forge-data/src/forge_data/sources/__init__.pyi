from .config import FilesConfig as FilesConfig
from .config import InstalledDocsConfig as InstalledDocsConfig
from .config import PythonStdlibConfig as PythonStdlibConfig
from .config import SourceConfig as SourceConfig
from .config import TokensConfig as TokensConfig
from .config import sources as sources

__all__ = [
    "FilesConfig",
    "InstalledDocsConfig",
    "PythonStdlibConfig",
    "SourceConfig",
    "TokensConfig",
    "sources",
]
