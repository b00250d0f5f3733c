"""How is a model called with one bundle of inputs, and where in its output are the logits?"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from forge_interp.errors import InterpError

Inputs = Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]
"""A tensor is the only argument, a tuple or list the positional ones, a mapping the named ones."""


def call_model(model: nn.Module, inputs: Inputs) -> Any:
    """Call `model` with a tensor, a tuple of positional arguments, or a mapping of named ones."""
    return run_model(model, *arguments(inputs))


def arguments(inputs: Inputs) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return positional and named arguments; InterpError where inputs are no tensor, tuple or mapping."""
    if not isinstance(inputs, Tensor | Mapping | tuple | list):
        raise InterpError(
            f"inputs are a {type(inputs).__name__}; expected a tensor, a tuple of positional arguments, "
            "or a mapping of named ones"
        )
    if isinstance(inputs, Mapping):
        return (), inputs
    return (inputs,) if isinstance(inputs, Tensor) else inputs, {}


def run_model(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call `model`; models of transformers make no cache of keys and values unless asked for one."""
    fills_cache = getattr(getattr(model, "config", None), "use_cache", False)
    takes_option = fills_cache and "use_cache" in inspect.signature(model.forward).parameters
    return model(*args, **{**({"use_cache": False} if takes_option else {}), **kwargs})


def output_logits(output: Any) -> Tensor:
    """Return the logits in an output: the output, its `.logits`, or its first item; else InterpError."""
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", output)
    if isinstance(logits, tuple | list) and logits:
        logits = logits[0]
    if isinstance(logits, Tensor) and logits.ndim > 0 and logits.is_floating_point():
        return logits
    what = f"a {type(output).__name__}"
    if isinstance(output, Tensor):
        what = f"a tensor of shape {tuple(output.shape)} and dtype {output.dtype}"
    elif isinstance(output, Mapping):
        what += f" with {sorted(map(str, output))}"
    raise InterpError(
        f"the model returned {what}; expected logits: a floating-point tensor with the "
        "vocabulary last, an output with `.logits`, or a tuple that starts with them; call it without labels"
    )
