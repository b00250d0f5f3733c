from .config import ResilienceConfig as ResilienceConfig
from .deadline import Deadline as Deadline
from .exit_codes import ExitCode as ExitCode
from .finite import FiniteGuard as FiniteGuard
from .finite import HeldBuffers as HeldBuffers
from .finite import step_if_finite as step_if_finite
from .signals import Signals as Signals
from .signals import Stopped as Stopped
from .spike import SpikeGuard as SpikeGuard
from .verdict import Verdict as Verdict
from .verdict import agree as agree

__all__ = [
    "Deadline",
    "ExitCode",
    "FiniteGuard",
    "HeldBuffers",
    "ResilienceConfig",
    "Signals",
    "SpikeGuard",
    "Stopped",
    "Verdict",
    "agree",
    "step_if_finite",
]
