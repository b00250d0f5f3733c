"""Evaluates a run during training on tasks of lm-evaluation-harness, on any layout of its ranks.

Every rank runs the harness on the same questions. Likelihoods are computed like losses: ranks that read
different data share the sequences, the others compute a sequence together, and sums over all ranks give each
rank all results. B batch, T tokens, D model dim, V vocabulary.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forge_config import ConfigError
from forge_model.generation.generate import Sampling
from forge_model.loss.cross_entropy import LossTerms, Sum, VocabularyShard
from forge_parallel.config import MeshConfig
from forge_parallel.runner import build_runner
from torch import Tensor
from torch.nn.functional import linear

from forge_trainer.commands.harness import (
    RunModel,
    asked_tasks,
    evaluator,
    known_tasks,
    loaded,
    require_text,
    results_of,
)
from forge_trainer.config.checks import sequence_cuts
from forge_trainer.config.eval import TasksConfig
from forge_trainer.endings import stops_of
from forge_trainer.hooks.base import RunView
from forge_trainer.steps.evaluation import evaluating

CHUNK_TOKENS = 1024
"""The number of tokens whose logits are computed at a time."""
LENGTHS = 64
"""Sequences are padded to multiples of this number, so that fewer shapes are compiled."""


def likelihood(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    vocabulary: VocabularyShard | None = None,
    softcap: float | None = None,
) -> LossTerms:
    """Replace the loss of a head: `rows` [B] are negative log-likelihoods and numbers of wrong guesses.

    The arguments are as in `forge_model.loss.cross_entropy.Loss`. A guess is the likeliest token. Collective
    over the ranks that share the vocabulary.
    """
    at = (labels >= 0).nonzero(as_tuple=True)
    rows = torch.zeros(2, len(labels), dtype=torch.float64, device=hidden.device)
    for chunk in torch.arange(len(at[0]), device=hidden.device).split(CHUNK_TOKENS):
        row, column = (index[chunk] for index in at)
        logits, target = linear(hidden[row, column], weight), labels[row, column]
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        logits = logits if vocabulary is None else vocabulary.gather(logits)
        known = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        found = torch.stack([-known.gather(-1, target[:, None])[:, 0], known.argmax(-1) != target])
        rows.index_add_(1, row, found.double())
    total = rows[0].sum()
    return LossTerms(total, {"loss": Sum(total, (labels >= 0).sum())}, Sum(rows[0], rows[1]))


@dataclass(frozen=True)
class OfFirstRank(Sampling):
    """Sampling in which all ranks take the tokens of the first rank, as rounding may differ between hosts."""

    group: Any = None

    def choose(self, logits: Tensor, generator: torch.Generator | None) -> Tensor:
        """See `Sampling.choose`. Collective."""
        chosen = super().choose(logits, generator).cpu()
        dist.broadcast(chosen, src=dist.get_global_rank(self.group, 0), group=self.group)
        return chosen.to(logits.device)


class TrainedModel(RunModel):
    """A model in training with the interface of the harness. All ranks call its methods in the same order.

    Args:
        run: the run.
        batch_size: sequences that a rank computes at once.
    """

    def __init__(self, run: RunView, batch_size: int) -> None:
        job, mesh = run.job, run.mesh
        tokenizer = job.data.tokenizer.build()
        super().__init__(
            run.parts[0], tokenizer, batch_size, device=mesh.device, stops=stops_of(job, tokenizer)
        )
        self._mesh, runner = mesh, getattr(run.step, "runner", None)
        if runner is None and mesh.pipeline.size > 1:
            raise ConfigError(
                f"eval.tasks with mesh.pp = {mesh.pipeline.size} computes with the `runner` of the step, and "
                f"{type(run.step).__name__} has none: give it this attribute, or use forge eval --tasks"
            )
        self._runner = runner or build_runner(run.parts, mesh)
        self._cuts = sequence_cuts(job.mesh, job.tensor_parallel, job.context_parallel)
        self.max_length -= self.max_length % self._cuts

    @torch.no_grad()
    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """See `RunModel`. Collective."""
        readers = self._mesh.batch
        found = torch.zeros(len(requests), 2, dtype=torch.float64, device=self._device)
        kept = [(context + new)[-(self.max_length + 1) :] for _, context, new in requests]
        for indices in self._batches(list(map(len, kept)), readers.size):
            length = self._padded(max(len(kept[i]) for i in indices) - 1)
            mine = indices[readers.rank :: readers.size]
            tokens = torch.zeros(self._batch_size, length, dtype=torch.int64)
            labels = torch.full_like(tokens, -100)
            lengths = torch.ones(self._batch_size, dtype=torch.int64)
            for place, index in enumerate(mine):
                row, end = torch.tensor(kept[index]), len(kept[index]) - 1
                tokens[place, :end], lengths[place] = row[:-1], end
                start = max(0, end - len(requests[index][2]))
                labels[place, start:end] = row[1 + start :]
            inputs = {"tokens": tokens, "labels": labels, **self._positions(lengths, length)}
            inputs = {name: value.to(self._device) for name, value in inputs.items()}
            terms = self._runner.forward(inputs | {"loss_fn": likelihood})
            if terms is not None:
                found[mine] = torch.stack(terms.rows, 1)[: len(mine)]
        self._mesh.pipeline.sum_(self._mesh.loss.sum_(found))
        return [(-value, wrong == 0) for value, wrong in found.tolist()]

    def _padded(self, length: int) -> int:
        multiple = math.lcm(LENGTHS, self._cuts)
        return min(-(-length // multiple) * multiple, self.max_length)

    def _sampling(self, sampling: Sampling) -> Sampling:
        if self._mesh.control_group is None:
            return sampling
        chosen = {field.name: getattr(sampling, field.name) for field in fields(sampling)}
        return OfFirstRank(**chosen, group=self._mesh.control_group)


def require_no_writing(mesh: MeshConfig, tasks: Mapping[str, Any], key: str) -> None:
    """Check that no task generates text if ranks share matrices, sequences or layers of the model.

    Args:
        mesh: the mesh of the job.
        tasks: tasks by name.
        key: configuration key that names the tasks.

    Raises:
        ConfigError: a task generates text on such a mesh.
    """
    writing = [name for name, task in tasks.items() if task.OUTPUT_TYPE == "generate_until"]
    if writing and max(mesh.tp, mesh.cp, mesh.pp) > 1:
        raise ConfigError(
            f"{key} names {', '.join(writing)}, which write answers; with mesh.tp = {mesh.tp}, "
            f"mesh.cp = {mesh.cp} and mesh.pp = {mesh.pp} a model cannot write, token by token: use "
            "forge eval --tasks in one process, or set all three to 1"
        )


def evaluate_shared(run: RunView, options: argparse.Namespace) -> dict[str, Any]:
    """Evaluate a model that ranks share on the tasks of `--tasks`; print and return scores. Collective.

    Raises:
        ConfigError: a task is unknown, or needs something that is not possible on this layout.
    """
    manager = asked_tasks(options)
    tasks = loaded(manager, options)
    require_text(tasks, "images are shown in one process")
    require_no_writing(run.job.mesh, tasks, "--tasks")
    with evaluating(*run.parts):
        return results_of(TrainedModel(run, run.job.train.micro_batch), manager, options)


class Tasks:
    """Evaluates a run on tasks, which are loaded once. Building and calling it are collective.

    Args:
        config: the section `[eval.tasks]`.
        run: the run.

    Raises:
        ConfigError: a task is unknown, its data cannot be loaded, or it generates text, which is not
            possible on this layout.
    """

    def __init__(self, config: TasksConfig, run: RunView) -> None:
        folder = None if config.folder is None else Path(config.folder)
        self._manager = known_tasks(config.names, folder, "eval.tasks.names", "eval.tasks.folder")
        try:
            tasks = self._manager.load(config.names)["tasks"]
        except Exception as error:  # whatever a data set that is not there raises
            raise ConfigError(f"a task of eval.tasks.names cannot be loaded: {error}") from error
        require_text(tasks, "eval.tasks shows no images; use forge eval RUN --tasks")
        self._config, self._run = config, run
        self._model = TrainedModel(run, config.batch_size or run.job.train.micro_batch)
        require_no_writing(run.job.mesh, tasks, "eval.tasks")

    def __call__(self) -> dict[str, float]:
        """Return all numbers as `<task>/<metric>`; empty on ranks that are not a host's first. Collective."""
        with evaluating(*self._run.parts):
            results = evaluator.simple_evaluate(
                self._model,
                tasks=[*self._config.names],
                task_manager=self._manager,
                num_fewshot=self._config.num_fewshot,
                limit=self._config.limit,
                bootstrap_iters=0,
                log_samples=False,
            )
        found: Any = dict(results or {}).get("results", {})
        return {
            f"{task}/{metric.removesuffix(',none')}": float(value)
            for task, numbers in found.items()
            for metric, value in numbers.items()
            if isinstance(value, int | float) and "_stderr" not in metric and "," in metric
        }
