"""One call runs a model on inputs and returns all values that flowed through it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from forge_interp.errors import optional
from forge_interp.hooks.capture import Select, capture
from forge_interp.hooks.sites import BySite
from forge_interp.model_inputs import Inputs, call_model


class Recording(BySite):
    """Values that flowed through a model, in the order of the run; `print` it for a table, `pickle` it.

    `output` is the model's output; `skipped` maps sites of wildcards without a tensor to the reason.
    """

    def __init__(self, values: Mapping[str, Tensor], output: Any, skipped: Mapping[str, str]) -> None:
        super().__init__(values)
        self.output, self.skipped = output, dict(skipped)

    def __repr__(self) -> str:
        rows = [("site", "shape", "dtype")]
        for key, x in self.items():
            shape = "nested" if x.is_nested else str(list(x.shape))
            rows.append((key, shape, str(x.dtype).removeprefix("torch.")))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)) for row in rows]
        skipped = [f"skipped, no tensor: {', '.join(self.skipped)}"] if self.skipped else []
        return "\n".join([line.rstrip() for line in lines] + skipped)

    def renamed(self, names: Mapping[str, str]) -> Recording:
        """Return the values at the sites in `names` (new name to site) by new name; see `canonical_sites`."""
        found = {name: self[site] for name, site in names.items() if site in self}
        return Recording(found, self.output, self.skipped)

    def to_xarray(self) -> Any:
        """Return an `xarray.Dataset`, one variable a site; needs xarray. bfloat16 becomes float32.

        All values share the dimension `batch` (dim 0); the others are named `site.dim1`, ...
        """
        xarray = optional("xarray", "to_xarray", "tables")
        variables = {}
        for site, value in self.items():
            dims = ["batch", *(f"{site}.dim{i}" for i in range(1, value.ndim))]
            variables[site] = (dims[: value.ndim], _numpy(value))
        return xarray.Dataset(variables)

    def to_dataframe(self) -> Any:
        """Return a `pandas.DataFrame`, one row a number: site, dim0, dim1, ..., value; needs pandas."""
        pandas = optional("pandas", "to_dataframe", "tables")
        frames = []
        for site, value in self.items():
            index = {f"dim{i}": of.ravel() for i, of in enumerate(np.indices(value.shape))}
            frames.append(pandas.DataFrame({"site": site, **index, "value": _numpy(value).ravel()}))
        return pandas.concat(frames, ignore_index=True)


def record(
    model: nn.Module,
    inputs: Inputs,
    sites: str | nn.Module | Iterable[str | nn.Module] = "**",
    *,
    select: Select | None = None,
    device: torch.device | str | None = None,
) -> Recording:
    """Run a model on inputs, without gradients, and keep the values at its sites.

    `inputs` are a tensor, a tuple of positional arguments, or a mapping of named ones; other arguments and
    errors: see `capture`. By default the output of every module is kept. A site of a wildcard that holds no
    tensor, such as an output with several, is listed in `skipped`.
    """
    with torch.no_grad(), capture(model, sites, select=select, device=device) as acts:
        output = call_model(model, inputs)
    return Recording(acts, output, acts.skipped)


def _numpy(value: Tensor) -> Any:
    value = value.detach().cpu()
    return (value.float() if value.dtype == torch.bfloat16 else value).numpy()
