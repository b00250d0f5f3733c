"""Every private name of torch that hooks need; all are there from 2.11 on."""

import traceback
from collections.abc import Iterator
from typing import Any

import torch
import torch.overrides
import torch.utils.checkpoint
from torch import Tensor, nn

_C: Any = torch._C
_RECORDS = "transformers.utils.output_capturing"


def backward_number() -> int:
    """Of the backward pass that this thread is in; -1 outside."""
    return _C._current_graph_task_id()


def is_recomputing() -> bool:
    """Whether activation checkpointing of torch is what runs a module from within a backward pass.

    A custom `autograd.Function` may call modules there, too, and these are calls as any other.
    """
    frames = traceback.walk_stack(None)
    return any(frame.f_code.co_filename == torch.utils.checkpoint.__file__ for frame, _ in frames)


def saved_tensors_hooks() -> Any:
    """What saves tensors for the backward pass now: another thing in a checkpointed part than around it."""
    return _C._autograd._top_saved_tensors_default_hooks(True)


def call_name(model: nn.Module) -> str:
    """The attribute of a module that a call of it calls, hooks and all."""
    return "_call_impl" if getattr(model, "_compiled_call_impl", None) is None else "_compiled_call_impl"


def order_hooks(module: nn.Module, first: list[int]) -> None:
    """Have the forward hooks of these numbers called first, in this order."""
    for number in [*first, *(number for number in module._forward_hooks if number not in first)]:
        if number in module._forward_hooks:
            module._forward_hooks[number] = module._forward_hooks.pop(number)


def recorders(module: nn.Module) -> list[int]:
    """The numbers of the forward hooks by which transformers writes down outputs that it is asked for."""
    hooks = module._forward_hooks.items()
    return [number for number, hook in hooks if (getattr(hook, "__module__", "") or "").startswith(_RECORDS)]


def is_transformed(value: Tensor) -> bool:
    """Whether a tensor belongs to vmap, grad or jvp of `torch.func`."""
    return _C._functorch.is_functorch_wrapped_tensor(value)


def function_modes() -> list[Any]:
    """The function modes that are active on this thread, the innermost last."""
    return torch.overrides._get_current_function_mode_stack()


def is_frame_compiled() -> bool:
    """Whether the compiler looks at frames now."""
    return bool(_C._dynamo.eval_frame.get_eval_frame_callback())


def fsdp_parameters(unit: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    """For each parameter of an FSDP2 unit its module, and how tensor parallelism splits it, or None."""
    state: Any = unit._get_fsdp_state()  # type: ignore[operator]
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    for parameter in (p for group in groups if group is not None for p in group.fsdp_params):
        spec = None
        if parameter.is_dtensor:
            spec = getattr(parameter, "_unsharded_dtensor_spec", None) or parameter._tp_spec
        yield parameter._module_info.module, spec
