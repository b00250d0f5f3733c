"""From a job to a run: the recipe, top to bottom."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from forge_ckpt.state import State
from forge_ckpt.store import Store
from forge_data.loader import Loader, build_loader
from forge_model.init import initialize
from forge_parallel.apply import materialize, parallelize
from forge_parallel.env import Env, process_group
from forge_parallel.mesh import Mesh, build_mesh
from forge_parallel.plan import Plan
from forge_parallel.tensor import local_chunk
from forge_resilience.deadline import Deadline
from forge_resilience.finite import FiniteGuard
from forge_resilience.signals import Signals
from forge_resilience.verdict import Verdict, agree
from torch import nn

from forge_trainer.clock import Clock
from forge_trainer.evaluate import evaluate
from forge_trainer.guards import Guard, SaveEvery
from forge_trainer.hooks import Hook
from forge_trainer.hooks.evaluate import Evaluate
from forge_trainer.hooks.log import Log
from forge_trainer.job import Job
from forge_trainer.loop import train
from forge_trainer.progress import Progress
from forge_trainer.step import TextStep
from forge_trainer.track import Tracker
