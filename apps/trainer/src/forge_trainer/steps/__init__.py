"""Training and evaluation steps: their interface, and the registry of `[step]`."""

from forge_trainer.steps.base import Step as Step
from forge_trainer.steps.base import StepConfig as StepConfig
from forge_trainer.steps.base import StepOutput as StepOutput
from forge_trainer.steps.base import steps as steps

from forge_trainer.steps.config import TextStepConfig as TextStepConfig  # isort: skip

__all__ = ["Step", "StepConfig", "StepOutput", "TextStepConfig", "steps"]
