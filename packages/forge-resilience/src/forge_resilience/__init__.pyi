from .config import ResilienceConfig as ResilienceConfig
from .deadline import Deadline as Deadline
from .exit_codes import ExitCode as ExitCode
from .finite import BuffersBefore as BuffersBefore
from .finite import NonFiniteCounter as NonFiniteCounter
from .finite import step_if_finite as step_if_finite
from .signals import Signals as Signals
from .signals import Stopped as Stopped
from .spike import SpikeCounter as SpikeCounter
from .verdict import Verdict as Verdict
from .verdict import agree as agree

__all__ = [
    "BuffersBefore",
    "Deadline",
    "ExitCode",
    "NonFiniteCounter",
    "ResilienceConfig",
    "Signals",
    "SpikeCounter",
    "Stopped",
    "Verdict",
    "agree",
    "step_if_finite",
]
