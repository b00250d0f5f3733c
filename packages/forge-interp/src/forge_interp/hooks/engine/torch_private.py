"""Every private name of torch that hooks need, and what is assumed where a version lacks it."""

import traceback
from collections.abc import Iterator
from typing import Any

import torch
import torch.overrides
import torch.utils.checkpoint
from torch import Tensor, nn

_RECORDS = "transformers.utils.output_capturing"


def backward_number() -> int:
    """Of the backward pass that this thread is in; -1 outside. Without the name no recomputation is known."""
    number = getattr(torch._C, "_current_graph_task_id", None)
    return -1 if number is None else number()


def is_recomputing() -> bool:
    """Whether activation checkpointing of torch is what runs a module from within a backward pass.

    A custom `autograd.Function` may call modules there, too, and these are calls as any other.
    """
    frames = traceback.walk_stack(None)
    return any(frame.f_code.co_filename == torch.utils.checkpoint.__file__ for frame, _ in frames)


def saved_tensors_hooks() -> Any:
    """What saves tensors for the backward pass now: another thing in a checkpointed part than around it."""
    try:
        from torch._C._autograd import _top_saved_tensors_default_hooks  # type: ignore[import-not-found]
    except ImportError:
        return None
    return _top_saved_tensors_default_hooks(True)


def call_name(model: nn.Module) -> str:
    """The attribute of a module that a call of it calls, hooks and all; `forward` where that is not known."""
    if getattr(model, "_compiled_call_impl", None) is not None:
        return "_compiled_call_impl"
    return "_call_impl" if hasattr(model, "_call_impl") else "forward"


def order_of_hooks(module: nn.Module) -> list[int]:
    """The numbers of its forward hooks, in the order in which they are called."""
    return list(module._forward_hooks)


def order_hooks(module: nn.Module, first: list[int]) -> None:
    """Have these of its forward hooks called first, in this order."""
    for number in [*first, *(number for number in module._forward_hooks if number not in first)]:
        if number in module._forward_hooks:
            module._forward_hooks[number] = module._forward_hooks.pop(number)


def recorders(module: nn.Module) -> list[int]:
    """Its forward hooks by which transformers writes down outputs that it is asked for."""
    hooks = module._forward_hooks.items()
    return [number for number, hook in hooks if (getattr(hook, "__module__", "") or "").startswith(_RECORDS)]


def is_transformed(value: Tensor) -> bool:
    """Whether a tensor belongs to vmap, grad or jvp of `torch.func`."""
    functorch = getattr(torch._C, "_functorch", None)
    return functorch is not None and functorch.is_functorch_wrapped_tensor(value)


def function_modes() -> list[Any]:
    """The function modes that are active on this thread, the innermost last; none where that is not known."""
    stack = getattr(torch.overrides, "_get_current_function_mode_stack", None)
    return [] if stack is None else stack()


def is_frame_compiled() -> bool:
    """Whether the compiler looks at frames now."""
    try:
        from torch._C._dynamo.eval_frame import get_eval_frame_callback
    except ImportError:
        return False
    return bool(get_eval_frame_callback())


def fsdp_parameters(unit: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    """For each parameter of an FSDP2 unit its module, and how tensor parallelism splits it, or None."""
    state: Any = unit._get_fsdp_state()  # type: ignore[operator]
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    for parameter in (p for group in groups if group is not None for p in group.fsdp_params):
        spec = None
        if parameter.is_dtensor:
            spec = getattr(parameter, "_unsharded_dtensor_spec", None) or parameter._tp_spec
        yield parameter._module_info.module, spec
