"""What is the metric of a run with patches, at one place or at several at once?"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from forge_interp.causal.table import Index, Metric, at_call, score
from forge_interp.errors import InterpError
from forge_interp.hooks.capture import capture
from forge_interp.hooks.edit import Edit, edit, patch
from forge_interp.hooks.engine import values
from forge_interp.hooks.sites import Site, named_modules
from forge_interp.model_inputs import Inputs, arguments, call_model, run_model

Place = tuple[str, Index]
"""A site, and an index into its value."""


@torch.no_grad()
def run_captured(
    model: nn.Module, inputs: Inputs, sites: str | Iterable[str], metric: Metric
) -> tuple[Mapping[str, Tensor], float]:
    """Return the activations of the sites and the metric of one plain run."""
    with capture(model, sites) as acts:
        output = call_model(model, inputs)
    return acts, score(metric, output)


@torch.no_grad()
def score_edited(model: nn.Module, inputs: Inputs, edits: Mapping[str, Edit], metric: Metric) -> float:
    """Return the metric of one run with edits."""
    with edit(model, edits):
        output = call_model(model, inputs)
    return score(metric, output)


def put(site: str, value: Tensor, where: Index = ...) -> Edit:
    """Make an edit that puts `value[where]` in place of `old[where]`; InterpError if their shapes differ."""

    def apply(old: Tensor) -> Tensor:
        same_shape(site, value, old)
        return patch(value[where], where)(old)

    return apply


def scores_alone(
    model: nn.Module, inputs: Inputs, acts: Mapping[str, Tensor], metric: Metric, places: Iterable[Place]
) -> list[float]:
    """Return the metric with each of these places patched, one run for each."""
    edits = [{at_call(site): put(site, acts[site], where)} for site, where in places]
    return [score_edited(model, inputs, edit, metric) for edit in edits]


def same_shape(site: str, clean: Tensor, corrupted: Tensor) -> None:
    """Raise InterpError unless both runs have the same shape at a site."""
    if clean.shape != corrupted.shape:
        raise InterpError(
            f"site {site!r} is {list(clean.shape)} in one run and {list(corrupted.shape)} in the other; "
            "expected the same: clean and corrupted inputs need equally many samples and tokens"
        )


class Sweep:
    """Corrupted runs with clean values at `at_once` places; a run begins where its first place is.

    The batch is repeated along dim 0, and each copy has the patch of one place. A module that is called once
    and ends before all these places does not run: a copy of its output without patches replaces it. These
    outputs are kept for the children of every module that contains a site.
    """

    def __init__(
        self, model: nn.Module, inputs: Inputs, acts: Mapping[str, Tensor], metric: Metric, at_once: int
    ) -> None:
        self._model, self._acts, self._metric, self._at_once = model, acts, metric, at_once
        self._alone = partial(scores_alone, model, inputs, acts, metric)
        args, kwargs = arguments(inputs)
        self._inputs: Any = (tuple(args), dict(kwargs))
        sizes = {len(x) for x in _tensors(self._inputs).values() if x.ndim}
        if at_once > 1:
            if len(sizes) != 1:
                raise InterpError(
                    f"tensors of the inputs have {sorted(sizes)} rows; expected one number, that of samples, "
                    "to repeat them along dim 0: give at_once=1"
                )
            self._inputs = _mapped(self._inputs, lambda x: torch.cat([x] * at_once) if x.ndim else x)
        self._samples = max(sizes, default=0)
        modules = named_modules(model)
        self._owners = {site: modules[Site.parse(site).module] for site in acts}
        self._inside = {module: {*module.modules()} - {module} for module in model.modules()}
        self._outputs, self._starts, output = self._record()
        self._corrupted = score(metric, self._split("the output", output)[0])
        self._checked: dict[frozenset[nn.Module], float] = {}
        floats = [x for x in (*acts.values(), *_tensors(output).values()) if x.is_floating_point()]
        self._eps = max((torch.finfo(x.dtype).eps for x in floats), default=0.0)
        self._largest = max(
            (x.nan_to_num(0, 0, 0).abs().max().item() for x in floats[len(acts) :]), default=0.0
        )

    def scores(self, places: Sequence[Place]) -> list[float]:
        """Return the metric with each of these places patched alone.

        The places of the largest and the smallest effect are checked by a run of each alone, for every new
        set of skipped modules, and where the largest is more than twice that of all checks before. The check
        finds samples that depend on each other, and modules with a memory. InterpError where the metric
        differs by more than rounding.
        """
        places = [*places, *[places[-1]] * (self._at_once - len(places))]
        sites = {site for site, _ in places}
        start, owners = min(self._starts[site] for site in sites), {self._owners[site] for site in sites}
        forwards = {
            module: lambda *args, output=output, **kwargs: _mapped(output, Tensor.clone)
            for module, (end, output) in self._outputs.items()
            if end < start and not self._inside[module] & owners  # or calls of the site are counted wrongly
        }
        with edit(self._model, {at_call(site): partial(self._put, site, places) for site in sites}):
            output = self._call(forwards)
        found = [score(self._metric, part) for part in self._split("the output", output)]
        effects = np.nan_to_num(np.abs(np.array(found) - self._corrupted), nan=np.inf)
        left_out = frozenset(forwards)
        if effects.max() > 2 * self._checked.get(left_out, -1.0):
            self._checked[left_out] = effects.max()
            for number in {int(effects.argmax()), int(effects.argmin())}:
                self._check(places[number], found[number])
        return found

    def _check(self, place: Place, found: float) -> None:
        (alone,), (site, where) = self._alone([place]), place
        rounding = self._eps**0.75 * self._largest + self._eps**0.5 * abs(alone - self._corrupted)
        if not np.isclose(found, alone, rtol=0, atol=rounding, equal_nan=True):
            raise InterpError(
                f"with {site!r} patched at {where!r} the metric is {alone} alone and {found} with at_once; "
                "expected one number: samples depend on each other (batch norm or dropout in training: "
                "model.eval(); experts with a capacity), or modules remember earlier calls: leave at_once out"
            )

    def _put(self, site: str, places: Sequence[Place], old: Tensor) -> Tensor:
        """Put the clean value of each place into its own copy of the batch."""
        clean, parts = self._acts[site], self._split(f"site {site!r}", old)
        for number, (name, where) in enumerate(places):
            parts[number] = put(site, clean, where)(parts[number]) if name == site else parts[number]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _split(self, what: str, tree: Any) -> list[Any]:
        """Return the part of each copy of the batch; InterpError: a tensor has no samples along dim 0."""
        parts = [tree] * self._at_once
        for path, tensor in _tensors(tree).items() if self._at_once > 1 else ():
            if tensor.shape[:1] != (self._at_once * self._samples,):
                raise InterpError(
                    f"{what} has {list(tensor.shape)} in a run of {self._at_once} places; expected dim 0 to "
                    f"count {self._samples} samples for each: leave this tensor out, or give at_once=1"
                )
            pieces = tensor.split(self._samples)
            parts = [values.write(part, path, piece) for part, piece in zip(parts, pieces, strict=True)]
        return parts

    def _record(self) -> tuple[dict[nn.Module, tuple[int, Any]], dict[str, int], Any]:
        """Return outputs of modules by their end, how many end before each site, and the model's output."""
        outputs: dict[nn.Module, tuple[int, Any]] = {}
        starts: dict[str, int] = {}
        calls: Counter[nn.Module] = Counter()

        def kept(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            calls[module] += 1
            if len(starts) < len(self._acts):
                outputs[module] = len(outputs), _mapped(output, Tensor.clone)
            return output

        owners = {*self._owners.values()}
        around = [module for module, inside in self._inside.items() if inside & owners]
        children = {child for module in around for child in module.children()}

        def reached(site: str, value: Tensor) -> None:
            starts.setdefault(site, len(outputs))

        with capture(self._model, map(at_call, self._acts), sink=reached):
            output = self._call({child: partial(kept, child, child.forward) for child in children})
        return {module: x for module, x in outputs.items() if calls[module] == 1}, starts, output

    def _call(self, forwards: Mapping[nn.Module, Callable[..., Any]]) -> Any:
        """Call the model with other forwards of modules; modules of TorchScript keep theirs."""
        forwards = {x: new for x, new in forwards.items() if not isinstance(x, torch.jit.ScriptModule)}
        before = {module: vars(module).get("forward") for module in forwards}
        try:
            for module, forward in forwards.items():
                vars(module)["forward"] = wraps(module.forward)(forward)
            return run_model(self._model, *self._inputs)
        finally:
            for module, forward in before.items():
                vars(module).pop("forward", None)
                vars(module).update({} if forward is None else {"forward": forward})


def _tensors(tree: Any) -> dict[tuple[str, ...], Tensor]:
    return {path: values.read(tree, path, Site("")) for path in values.tensor_paths(tree)}


def _mapped(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    for path, tensor in _tensors(tree).items():
        tree = values.write(tree, path, change(tensor))
    return tree
