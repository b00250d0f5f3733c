"""Every private name of torch that hooks need; all exist from 2.11 on."""

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
    """Return the number of the backward pass that this thread is in; -1 outside."""
    return _C._current_graph_task_id()


def is_recomputing() -> bool:
    """Whether activation checkpointing of torch runs a module inside a backward pass.

    A custom `autograd.Function` may call modules there, too: these are ordinary calls.
    """
    frames = traceback.walk_stack(None)
    return any(frame.f_code.co_filename == torch.utils.checkpoint.__file__ for frame, _ in frames)


def saved_tensors_hooks() -> Any:
    """Return the hooks that save tensors for the backward pass; a checkpointed part has its own hooks."""
    return _C._autograd._top_saved_tensors_default_hooks(True)


def call_name(model: nn.Module) -> str:
    """Return the attribute that a call of a module runs, hooks included."""
    return "_call_impl" if getattr(model, "_compiled_call_impl", None) is None else "_compiled_call_impl"


def order_hooks(module: nn.Module, first: list[int]) -> None:
    """Let the forward hooks with these numbers run first, in this order."""
    for number in [*first, *(number for number in module._forward_hooks if number not in first)]:
        if number in module._forward_hooks:
            module._forward_hooks[number] = module._forward_hooks.pop(number)


def recorders(module: nn.Module) -> list[int]:
    """Return the numbers of the forward hooks with which transformers records requested outputs."""
    hooks = module._forward_hooks.items()
    return [number for number, hook in hooks if (getattr(hook, "__module__", "") or "").startswith(_RECORDS)]


def is_transformed(value: Tensor) -> bool:
    """Whether a tensor belongs to vmap, grad or jvp of `torch.func`."""
    return _C._functorch.is_functorch_wrapped_tensor(value)


def function_modes() -> list[Any]:
    """Return the function modes that are active on this thread, the innermost last."""
    return torch.overrides._get_current_function_mode_stack()


def is_frame_compiled() -> bool:
    """Whether the compiler inspects frames now."""
    return bool(_C._dynamo.eval_frame.get_eval_frame_callback())


def fsdp_parameters(unit: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    """Yield the module of each parameter of an FSDP2 unit, and its tensor-parallel split or None."""
    state: Any = unit._get_fsdp_state()  # type: ignore[operator]
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    for parameter in (p for group in groups if group is not None for p in group.fsdp_params):
        spec = None
        if parameter.is_dtensor:
            spec = getattr(parameter, "_unsharded_dtensor_spec", None) or parameter._tp_spec
        yield parameter._module_info.module, spec
