"""How is a model given a batch?"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from forge_interp.errors import InterpError
from forge_interp.extraction.samples import Batch, Names, leaves
from forge_interp.hooks.sites import find_sites, named_modules

Forward = Callable[[nn.Module, Any], Any]


class Feeder:
    """Calls a model with batches, or `forward` with the model and the inputs of a batch.

    From a mapping, the entries that the model's `forward` names are passed, also the mask; ids that `forward`
    does not name go first. Caches of keys and values are switched off.
    """

    def __init__(self, model: nn.Module, names: Names, forward: Forward | None) -> None:
        self.is_default = forward is None
        self._model = model
        self._names = names
        self._forward = forward
        parameters = inspect.signature(named_modules(model)[""].forward).parameters.values()
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        self._named = {p.name for p in parameters if p.kind not in variadic}
        self._takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
        held = (tensor for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta)
        first = next(held, None)  # what accelerate has put elsewhere is on meta, and its hooks move inputs
        self._device = torch.device("cpu") if first is None else first.device

    def __call__(self, batch: Batch) -> None:
        """Run the model on a batch; InterpError where it is unclear how."""
        inputs = _to(batch.inputs, self._device)
        if self._forward is not None:
            self._forward(self._model, inputs)
        elif isinstance(inputs, Tensor | Mapping):
            args, kwargs = ([inputs], {}) if isinstance(inputs, Tensor) else self._arguments(inputs)
            options = {"use_cache": False} if "use_cache" in self._named - kwargs.keys() else {}
            self._model(*args, **kwargs, **options)
        else:
            raise InterpError(
                f"batch {batch.number} is a {type(inputs).__name__}; expected a tensor or a mapping: say "
                "what is what with forward=lambda model, batch: model(batch[0])"
            )

    def _arguments(self, inputs: Mapping[str, Any]) -> tuple[list[Tensor], dict[str, Any]]:
        numbers = {key: value for key, value in inputs.items() if _has_numbers(value)}
        if self._takes_any and not self._named:
            return [], numbers
        wanted = self._named | ({self._names.mask} if self._takes_any else set())
        kwargs = {key: value for key, value in numbers.items() if key in wanted}
        ids = self._names.tokens
        if ids in numbers and ids not in kwargs:
            return [numbers[ids]], kwargs
        if kwargs or len(numbers) == 1:
            return ([], kwargs) if kwargs else (list(numbers.values()), {})
        raise InterpError(
            f"the samples have {', '.join(map(repr, inputs))}, the model takes "
            f"{', '.join(sorted(self._named))}; expected a common name: rename the entries, or give forward="
        )


def rows_of_others(model: nn.Module, patterns: Iterable[str], tokens: str | None) -> dict[str, str]:
    """Return the patterns of an encoder-decoder model whose rows have other ids than `tokens`, and why."""
    modules = named_modules(model)
    whole: Any = modules[""]
    if tokens is None or not getattr(getattr(whole, "config", None), "is_encoder_decoder", False):
        return {}
    encoder = whole.get_encoder() if hasattr(whole, "get_encoder") else None
    if not isinstance(encoder, nn.Module) or encoder is whole:
        return {}
    inside = set(encoder.modules())
    side, asked = ("decoder", "encoder")[:: 1 if tokens.startswith("decoder_") else -1]
    beginning = "" if side == "decoder" else "decoder_"
    return {
        pattern: f"rows of the {asked} at {pattern} are not those of {tokens!r}; expected its ids: give "
        f"tokens='{beginning}input_ids', mask='{beginning}attention_mask', or tokens=None, or make a row a "
        "sample with select"
        for pattern, sites in find_sites(model, patterns).items()
        if any((modules[site.module] in inside) != (side == "encoder") for site in sites)
    }


def _has_numbers(inputs: Any) -> bool:
    return all(isinstance(leaf, Tensor) for leaf in leaves(inputs)) and not isinstance(inputs, list)


def _to(inputs: Any, device: torch.device) -> Any:
    if isinstance(inputs, Tensor):
        return inputs.to(device, non_blocking=True)
    if isinstance(inputs, Mapping):
        return {key: _to(value, device) for key, value in inputs.items()}
    return tuple(_to(value, device) for value in inputs) if isinstance(inputs, tuple) else inputs
