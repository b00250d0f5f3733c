"""Pipeline parallelism: the stages of a model on several ranks, run by `torch.distributed.pipelining`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from forge_parallel import capabilities
from forge_parallel.config import PIPELINES, ParallelConfig
from forge_parallel.error import ParallelError
from forge_parallel.mesh import Mesh
from forge_parallel.plan import Plan
from forge_parallel.runner import Inputs, sums_of
from forge_parallel.stages import rank_of, stages_of
from forge_parallel.tensor import local_part, mark_as_copy


class Pipeline:
    """The stages that this rank has; see `forge_parallel.runner.Runner`.

    Args:
        parts: the stages of `stages_of(...)`, made parallel.
        mesh: the grid of ranks.
        plan: the plan of the model; uses its own `stages` and `sequence_inputs`.
        config: the config applied to the parts.
    """

    def __init__(self, parts: Sequence[nn.Module], mesh: Mesh, plan: Plan, config: ParallelConfig) -> None:
        assert plan.stages is not None, "keep_stage has cut the model by them"
        self._parts, self._mesh, self._config, self._stage_plan = list(parts), mesh, config, plan.stages
        tp = 1 if mesh.tp is None else mesh.tp.size()
        config.require_pipeline(mesh.pipeline.size, plan.stages.extra_tokens, tp, mesh.context.size)
        if config.pipeline.splits_backward and not capabilities.splits_backward():
            raise ParallelError(
                f'pipeline.schedule = "{config.pipeline.schedule}" needs torch 2.15, and this is '
                f"{torch.__version__}; choose 1f1b, gpipe or interleaved_1f1b"
            )
        if not plan.sequence_inputs:
            raise ParallelError(
                "the plan names no `sequence_inputs`, by which a pipeline knows micro-batches"
            )
        self._ranks = mesh.pipeline
        self._stages = stages_of(self._ranks.rank, self._ranks.size, config.pipeline)
        self._last = self._ranks.size * config.pipeline.held() - 1
        self._plan = plan
        self._schedules: dict[tuple[int, ...], Any] = {}
        self._finish: Callable[[Any], Any] = _unchanged
        self._others: Inputs = {}
        self._tied, self._tied_group = self._find_tied()
        self._around = sums_of(self._parts, mesh)
        for stage, part in zip(self._stages, self._parts, strict=True):
            part.register_forward_pre_hook(self._complete, prepend=True, with_kwargs=True)
            if stage == self._last:
                part.register_forward_hook(lambda _module, _args, out: self._finish(out))
            else:
                part.register_forward_hook(_hidden_state)

    def backward(self, micro_batches: Sequence[Inputs], finish: Callable[[Any], Tensor]) -> None:
        """See `Runner.backward`.

        Raises:
            ParallelError: the micro-batches differ in shape, or the schedule cannot take so many.
        """
        shapes = {tuple(inputs[self._plan.sequence_inputs[0]].shape) for inputs in micro_batches}
        if len(shapes) > 1:
            raise ParallelError(
                f"micro-batches of the shapes {sorted(shapes)}: a pipeline needs equal ones; make the share "
                "of a rank in train.global_batch a multiple of train.micro_batch"
            )
        key = (len(micro_batches), *shapes.pop())
        if key not in self._schedules:
            self._schedules[key] = self._schedule(*key)
        # the schedules of torch take tensors only
        self._others = {k: v for k, v in micro_batches[0].items() if not isinstance(v, Tensor)}
        tensors = [{k: v for k, v in given.items() if isinstance(v, Tensor)} for given in micro_batches]
        self._finish = finish
        try:
            with self._around():
                capabilities.run_schedule(self._schedules[key], tensors)
        finally:
            self._finish, self._others = _unchanged, {}
        self._sum_tied()

    def forward(self, inputs: Inputs) -> Any:
        """See `Runner.forward`. The stages run one after the other."""
        ranks, config, out = self._ranks, self._config.pipeline, None
        batch, tokens = inputs[self._plan.sequence_inputs[0]].shape
        for stage, part in zip(self._stages, self._parts, strict=True):
            args: tuple[Any, ...] = ()
            if stage > 0:
                source = rank_of(stage - 1, ranks.size, config)
                args = (out if source == ranks.rank else self._receive(source, batch, tokens),)
            out = part(*args, **inputs)
            if stage == self._last:
                return out
            target = rank_of(stage + 1, ranks.size, config)
            if target != ranks.rank:
                dist.send(out.contiguous(), group=ranks.group, group_dst=target)
        return None

    def _find_tied(self) -> tuple[list[nn.Parameter], dist.ProcessGroup | None]:
        """Return this rank's parameters that the first and the last stage share, and the group of the two."""
        names, ends = self._stage_plan.tied, (0, self._ranks.size - 1)
        if not names or self._ranks.rank not in ends:
            return [], None
        part = self._parts[-1 if self._ranks.rank else 0]
        found = [
            parameter
            for name, parameter in part.named_parameters()
            if parameter.requires_grad and any(name.startswith(f"{module}.") for module in names)
        ]
        if self._ranks.rank:
            for parameter in found:
                mark_as_copy(parameter)
        if self._ranks.size == 2:
            return found, self._ranks.group
        assert self._ranks.group is not None
        both = [dist.get_global_rank(self._ranks.group, end) for end in ends]
        made = dist.new_group(both, use_local_synchronization=True)
        assert isinstance(made, dist.ProcessGroup)
        return found, made

    def _sum_tied(self) -> None:
        """Sum the gradients of parameters that the first and the last stage share: the same bits on both."""
        for parameter in self._tied:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(local_part(parameter.grad), group=self._tied_group)

    def _receive(self, source: int, batch: int, tokens: int) -> Tensor:
        hidden = torch.empty_like(self._hidden(batch, tokens), device=self._mesh.device)
        dist.recv(hidden, group=self._ranks.group, group_src=source)
        return hidden

    def _complete(self, _: nn.Module, args: tuple[Any, ...], kwargs: Inputs) -> tuple[tuple[()], Inputs]:
        """Name the hidden state, the only positional argument, and add the arguments that are no tensors."""
        kwargs, stages = kwargs | self._others, self._stage_plan
        if not args:
            return (), kwargs
        dropped = {*stages.instead_of, *stages.first_inputs}
        kept = {name: value for name, value in kwargs.items() if name not in dropped}
        return (), kept | {stages.hidden: args[0]}

    def _hidden(self, batch: int, tokens: int) -> Tensor:
        """A hidden state on the meta device, as it passes from stage to stage; extra rows are never cut."""
        cuts = self._mesh.context.size
        if self._mesh.tp is not None and self._config.tensor_parallel.sequence:
            cuts *= self._mesh.tp.size()
        kept = next(self._parts[0].parameters()).dtype
        compute = self._config.precision.compute_dtype(self._mesh.device.type)
        dtype = kept if compute == "float32" else getattr(torch, compute)
        rows, dim = tokens // cuts + self._stage_plan.extra_tokens, self._stage_plan.dim
        return torch.empty(batch, rows, dim, dtype=dtype, device="meta", requires_grad=True)

    def _schedule(self, count: int, batch: int, tokens: int) -> Any:
        """Return the schedule of `count` micro-batches [batch, tokens]."""
        self._config.pipeline.require_micro_batches(count, self._ranks.size)
        hidden, name = self._hidden(batch, tokens), self._config.pipeline.schedule
        stages = [
            PipelineStage(
                part,
                stage,
                self._last + 1,
                self._mesh.device,
                input_args=() if stage == 0 else (hidden,),
                output_args=(hidden.sum(),) if stage == self._last else (hidden,),
                group=self._ranks.group,
            )
            for stage, part in zip(self._stages, self._parts, strict=True)
        ]
        kind = get_schedule_class(PIPELINES[name])
        return kind(
            stages[0] if issubclass(kind, PipelineScheduleSingle) else stages,
            n_microbatches=count,
            loss_fn=lambda output, _: output,
            scale_grads=False,
        )


def _hidden_state(_: nn.Module, __: Any, out: Any) -> Tensor:
    """Return the tensor that a stage passes on.

    Raises:
        ParallelError: it is no tensor.
    """
    out = out[0] if isinstance(out, tuple) else out
    if not isinstance(out, Tensor):
        raise ParallelError(
            f"a stage returns a {type(out).__name__}, and a pipeline passes tensors; with a model of "
            "transformers give it use_cache=False and return_dict=False"
        )
    return out


def _unchanged(out: Any) -> Any:
    return out
