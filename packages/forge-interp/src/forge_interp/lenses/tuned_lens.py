"""What would the model predict from here, if each layer may first be brought into the basis of the last?

Letters: L sites, B batch, T tokens, D model dim, V vocabulary.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from forge_interp.errors import InterpError
from forge_interp.hooks.sites import find_sites
from forge_interp.lenses.lens import LensResult, divergence, read_lens, run_with_final
from forge_interp.lenses.unembedding import Readout, Unembedding
from forge_interp.model_inputs import Inputs, arguments
from forge_interp.progress import progress as with_progress

Mask = Callable[[Any], Tensor]
"""One bundle of inputs -> [...] bool or integer, nonzero where a position counts."""

_FORMAT = "forge-interp tuned lens 1"
_COPIES = 8


class TunedLens:
    """The logit lens with a trained affine translator in front, one for each site.

    logits = head(norm(x + A x + b)), A [D, D] and b [D] zero at first, so that an untrained tuned lens is the
    logit lens. `translators`, {site: (A, b)}, filled by the first step of `fit`, are float32 (float64 for
    float64 models) whatever the dtype of the model, which is never changed.

    Source: Belrose et al. 2023, arXiv:2303.08112, section 2.
    """

    def __init__(
        self,
        model: nn.Module,
        sites: str | Iterable[str],
        *,
        norm: Readout | None = None,
        head: Readout | None = None,
        check: bool = True,
    ) -> None:
        """Prepare a lens; nothing is trained yet. Arguments and errors are those of `logit_lens`."""
        self.sites = (sites,) if isinstance(sites, str) else tuple(sites)
        find_sites(model, self.sites)
        self.translators: dict[str, tuple[Tensor, Tensor]] = {}
        self._model = model
        self._unembedding = Unembedding(model, norm, head)
        self._check = self._unembedding if check else None

    def decode(self, site: str, hidden: Tensor) -> Tensor:
        """[..., D] of a site -> logits [..., V]; InterpError for a site that was not trained."""
        if site not in self.translators:
            raise InterpError(
                f"site {site!r} has no translator; expected one of {list(self.translators)}: call fit or load"
            )
        matrix, bias = self._pair(site, hidden.device)
        wide = hidden.to(matrix.dtype)
        return self._unembedding((wide + nn.functional.linear(wide, matrix, bias)).to(hidden.dtype))

    def read(
        self,
        *args: Any,
        targets: Tensor | None = None,
        top_k: int = 5,
        keep_logits: bool = False,
        max_bytes: int = 1 << 28,
        **kwargs: Any,
    ) -> LensResult:
        """Run the model once and read every site; arguments and result as those of `logit_lens`."""
        acts, final = run_with_final(self._model, self.sites, self._check, args, kwargs)
        how: dict[str, Any] = {"top_k": top_k, "keep_logits": keep_logits, "max_bytes": max_bytes}
        return read_lens(acts, self.decode, final=final, targets=targets, **how)

    def fit(
        self,
        batches: Iterable[Inputs],
        *,
        steps: int,
        lr: float = 1e-3,
        mask: Mask | None = None,
        max_bytes: int = 1 << 28,
        progress: bool = True,
    ) -> np.ndarray:
        """Train all translators at once to minimize KL(model || lens), averaged over positions.

        Adam, its rate `lr` falling linearly to 0. Nothing is drawn at random: the same batches give the same
        lens. A further call goes on with the translators of this one and a new Adam. Call `model.eval()`
        first if it drops out. Errors are those of `logit_lens`.

        Args:
            batches: inputs of the model, each a tensor, a tuple of positional arguments or a mapping; gone
                through again when they end before `steps` (an iterator cannot be).
            steps: how many batches to take.
            lr: of the first step.
            mask: which positions count; default: "attention_mask" where a mapping has it, else all.
            max_bytes: how much the distributions in work may take at once.
            progress: draw a bar on a terminal.

        Returns [steps, L] the divergence before each step, in nats.
        """
        if steps < 1:
            raise InterpError(f"steps is {steps}; expected a positive number")
        history: list[list[float]] = []
        sites: list[str] = []
        optimizer: torch.optim.Adam | None = None
        taken = with_progress(_repeat(batches, steps), steps, "tuned lens", progress)
        try:
            for step, inputs in enumerate(taken):
                acts, final = run_with_final(self._model, self.sites, self._check, *arguments(inputs))
                sites = sites or list(acts)
                if list(acts) != sites:
                    raise InterpError(f"a batch reached {list(acts)}; expected {sites}, as those before it")
                keep = _positions(inputs, mask, final)
                weights = self._weights(acts)
                if optimizer is None:
                    optimizer = torch.optim.Adam(weights, lr=lr)
                losses = [self._differentiate(site, acts[site], final, keep, max_bytes) for site in acts]
                history.append(losses)
                optimizer.param_groups[0]["lr"] = lr * (1 - step / steps)
                optimizer.step()
                optimizer.zero_grad()
        finally:
            for weight in self._weights({}):
                weight.requires_grad_(False).grad = None
        return np.array(history)

    def save(self, path: str | Path) -> None:
        """Write the translators to a safetensors file, which is whole or not there."""
        if not self.translators:
            raise InterpError("the lens has no translators to save; expected a trained one: call fit first")
        tensors = {}
        for number, (matrix, bias) in enumerate(self.translators.values()):
            tensors |= {f"{number}.matrix": matrix.contiguous(), f"{number}.bias": bias.contiguous()}
        sites = json.dumps(list(self.translators))
        partial = f"{path}.partial"
        save_file(tensors, partial, metadata={"format": _FORMAT, "sites": sites})
        os.replace(partial, path)

    @classmethod
    def load(cls, path: str | Path, model: nn.Module, **options: Any) -> TunedLens:
        """Read a lens that `save` wrote, for the same model and with the same options."""
        try:
            with safe_open(str(path), framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise InterpError(f"{path} cannot be read ({error}); expected what save wrote") from error
        if metadata.get("format") != _FORMAT:
            raise InterpError(f"{path} has the format {metadata.get('format')!r}; expected {_FORMAT!r}")
        sites = json.loads(metadata["sites"])
        lens = cls(model, sites, **options)
        lens.translators = {s: (tensors[f"{i}.matrix"], tensors[f"{i}.bias"]) for i, s in enumerate(sites)}
        return lens

    def _weights(self, acts: Mapping[str, Tensor]) -> list[Tensor]:
        """All matrices and biases, ready to be trained; those of new sites start at zero."""
        for site, hidden in acts.items():
            if site not in self.translators:
                dim, wide = hidden.shape[-1], torch.promote_types(hidden.dtype, torch.float32)
                zeros = torch.zeros(dim + 1, dim, dtype=wide, device=hidden.device)
                self.translators[site] = zeros[:-1].clone(), zeros[-1].clone()
            self._pair(site, hidden.device)
        weights = [weight for pair in self.translators.values() for weight in pair]
        return [weight.requires_grad_() for weight in weights]

    def _pair(self, site: str, device: torch.device) -> tuple[Tensor, Tensor]:
        """The translator of a site, moved to where its activations are."""
        matrix, bias = self.translators[site]
        if matrix.device != device:
            self.translators[site] = (matrix.to(device), bias.to(device))
        return self.translators[site]

    @torch.enable_grad()
    def _differentiate(self, site: str, hidden: Tensor, final: Tensor, keep: Tensor, max_bytes: int) -> float:
        """Add the gradient of one site's mean divergence to its translator; give the divergence."""
        pair = self._pair(site, hidden.device)
        rows, wanted = hidden[keep], final[keep]
        size = max(1, max_bytes // (_COPIES * final.shape[-1] * max(4, final.element_size())))
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        for start in range(0, rows.shape[0], size):
            cut = slice(start, start + size)
            logits = self.decode(site, rows[cut])
            log_probs = logits.to(torch.promote_types(torch.float32, logits.dtype)).log_softmax(-1)
            loss = divergence(log_probs, wanted[cut]).sum() / rows.shape[0]
            for weight, gradient in zip(pair, torch.autograd.grad(loss, pair), strict=True):
                weight.grad = gradient if weight.grad is None else weight.grad + gradient
            total += loss.detach()
        return total.item()


def _positions(inputs: Inputs, mask: Mask | None, final: Tensor) -> Tensor:
    """[...] bool, which positions count."""
    if mask is not None:
        keep = mask(inputs)
    elif isinstance(inputs, Mapping) and "attention_mask" in inputs:
        keep = inputs["attention_mask"]
    else:
        keep = torch.ones(final.shape[:-1])
    if keep.shape != final.shape[:-1] or not bool(keep.any()):
        raise InterpError(
            f"the mask has shape {tuple(keep.shape)} and {int(keep.count_nonzero())} positions; expected "
            f"{tuple(final.shape[:-1])} and at least one: pass mask=, a function of the inputs"
        )
    return keep.to(device=final.device, dtype=torch.bool)


def _repeat(batches: Iterable[Inputs], steps: int) -> Iterator[Inputs]:
    done = 0
    while done < steps:
        before = done
        for inputs in batches:
            if done == steps:
                return
            done += 1
            yield inputs
        if done == before:
            raise InterpError(f"the batches ended after {done} of {steps} steps; expected more, or a list")
