from .config import CheckpointConfig as CheckpointConfig
from .config import DenseConfig as DenseConfig
from .error import CheckpointError as CheckpointError
from .error import DamagedError as DamagedError
from .error import LockedError as LockedError
from .error import UnreadableError as UnreadableError
from .error import UnsupportedError as UnsupportedError
from .interop.weights import Weights as Weights
from .interop.weights import write_weights as write_weights
from .lease import Lease as Lease
from .lease import take as take
from .manifest import Manifest as Manifest
from .manifest import Snapshot as Snapshot
from .saver import Saver as Saver
from .state import TrainState as TrainState
from .state import model_tensors as model_tensors
from .store import Store as Store

__all__ = [
    "CheckpointConfig",
    "CheckpointError",
    "DamagedError",
    "DenseConfig",
    "Lease",
    "LockedError",
    "Manifest",
    "Saver",
    "Snapshot",
    "Store",
    "TrainState",
    "UnreadableError",
    "UnsupportedError",
    "Weights",
    "model_tensors",
    "take",
    "write_weights",
]
