"""The weights of KempnerForge's text model under our names, in our layout.

Both rotate halves of a head, so that no rows change places. Packed experts are [experts, in, out] there and
[experts, out, in] here. Source: the names in the state of kempnerforge.model.transformer at commit 5666d0d;
weights of images and of pipeline stages have other names, and are refused.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from forge_ckpt.error import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

PREFIX = "model."
"""Of the names of weights in its checkpoints."""

_EMBEDDING, _HEAD = "token_embedding.embedding.weight", "output_head.proj.weight"
_OUTSIDE = {_EMBEDDING: "embed.weight", _HEAD: "head.weight"}
_PARTS = {
    "attention.q_proj": "attention.wq",
    "attention.k_proj": "attention.wk",
    "attention.v_proj": "attention.wv",
    "attention.o_proj": "attention.wo",
    "attention.q_norm": "attention.q_norm",
    "attention.k_norm": "attention.k_norm",
    "mlp.gate_proj": "ffn.w_gate",
    "mlp.up_proj": "ffn.w_up",
    "mlp.down_proj": "ffn.w_down",
    "mlp.shared_expert.gate_proj": "ffn.shared.w_gate",
    "mlp.shared_expert.up_proj": "ffn.shared.w_up",
    "mlp.shared_expert.down_proj": "ffn.shared.w_down",
    "mlp.router.gate": "ffn.router",
}
_NORMS = {"attention_norm": "attention_norm", "mlp_norm": "ffn_norm"}
_PACKED = {"gate_w": "w_gate", "up_w": "w_up", "down_w": "w_down"}
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")
_BIAS, _AVERAGE = "mlp.router.expert_bias", "mlp.router.expert_ema"
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")


class _Place(NamedTuple):
    """The tensor of ours that one of theirs is, or, with a number, an expert of it."""

    name: str
    expert: int | None = None
    is_packed: bool = False


class OfKempnerForge(Mapping[str, "Tensor"]):
    """Weights of a text model of KempnerForge under our names; each is read on access.

    Args:
        tensors: by its names, without `model.`.
        is_tied: whether the output is the embedding; then one of the two is kept.

    Raises:
        CheckpointError: names are none of that model (all are listed), or experts are missing.
    """

    def __init__(self, tensors: Mapping[str, Tensor], is_tied: bool = False) -> None:
        self._tensors, self._is_tied = tensors, is_tied
        self._theirs: dict[str, dict[int | None, str]] = {}
        self._packed: set[str] = set()
        unknown: list[str] = []
        for name in tensors:
            if name.endswith(_AVERAGE) or (is_tied and name == _HEAD):
                continue
            if (place := _place(name)) is None:
                unknown.append(name)
                continue
            self._theirs.setdefault(place.name, {})[place.expert] = name
            self._packed |= {place.name} if place.is_packed else set()
        if unknown:
            listed = "".join(f"\n  {name}" for name in unknown[:20])
            raise CheckpointError(
                f"{len(unknown)} tensors are no weights of a text model of KempnerForge:{listed}"
            )
        for name, experts in self._theirs.items():
            if None not in experts and sorted(one for one in experts if one is not None) != [
                *range(len(experts))
            ]:
                raise CheckpointError(f"{name} is made of the experts {sorted(map(str, experts))}; some miss")

    def __getitem__(self, name: str) -> Tensor:
        import torch

        names = self._theirs[name]
        if None not in names:
            return torch.stack([self._tensors[names[expert]] for expert in range(len(names))])
        tensor = self._tensors[names[None]]
        return tensor.transpose(1, 2).contiguous() if name in self._packed else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._theirs)

    def __len__(self) -> int:
        return len(self._theirs)

    def require_same_meaning(self) -> None:
        """Check that the values compute the same here as there.

        Raises:
            CheckpointError: a bias of experts is not zero, or a tied output differs from the embedding.
        """
        for name in self._tensors:
            if name.endswith(_BIAS) and (most := self._tensors[name].float().abs().max().item()) > 0:
                raise CheckpointError(
                    f"{name} is not zero (up to {most:.3g}): there it also weighs the experts, here it "
                    "only chooses them, and logits would differ. Runs that were sharded have zeros"
                )
        tied = self._is_tied and _HEAD in self._tensors
        if tied and not self._tensors[_HEAD].equal(self._tensors[_EMBEDDING]):
            raise CheckpointError(f"model.tie_embeddings = true, and {_HEAD} is another than {_EMBEDDING}")


def read_model(path: Path) -> tuple[str, bool]:
    """Return the text of a TOML that `forge convert` wrote, and whether its model has tied embeddings.

    Raises:
        CheckpointError: it cannot be read, or describes no model by our keys.
    """
    try:
        text = path.read_text(encoding="utf-8")
        model = tomllib.loads(text).get("model")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not isinstance(model, dict) or "num_layers" not in model:
        raise CheckpointError(
            f"{path} has no [model] with num_layers; expected what `forge convert FILE --from kempnerforge` "
            "writes"
        )
    return text, model.get("tie_embeddings") is True


def require_whole(folder: Path) -> None:
    """Check that a folder is a whole checkpoint.

    Raises:
        CheckpointError: it is that of pipeline stages, or holds steps.
    """
    if (folder / ".metadata").exists():
        return
    if stages := _having(folder, "pp*"):
        raise CheckpointError(
            f"{folder} holds the pipeline stages {', '.join(stages)}, whose weights cannot be put together: "
            "load it there on one stage and save it again"
        )
    if steps := _having(folder, "step_*"):
        raise CheckpointError(
            f"{folder} holds {', '.join(steps[-3:])}; name one of them: {folder / steps[-1]}"
        )


def _having(folder: Path, pattern: str) -> list[str]:
    return sorted(path.parent.name for path in folder.glob(f"{pattern}/.metadata"))


def _place(name: str) -> _Place | None:
    """Return the place of a weight here; None if it is unknown."""
    if (ours := _OUTSIDE.get(name)) is not None:
        return _Place(ours)
    found = _LAYER.fullmatch(name)
    if found is None:
        return _Place(name) if name in ("norm.weight", "norm.bias") else None
    before, rest = f"layers.{found[1]}.", found[2]
    part, _, kind = rest.rpartition(".")
    if part in _NORMS and kind in ("weight", "bias"):
        return _Place(f"{before}{_NORMS[part]}.{kind}")
    if part in _PARTS and kind == "weight":
        return _Place(f"{before}{_PARTS[part]}.weight")
    if part == "mlp" and kind in _PACKED:
        return _Place(f"{before}ffn.experts.{_PACKED[kind]}", is_packed=True)
    if expert := _EXPERT.fullmatch(rest):
        return _Place(f"{before}ffn.experts.w_{expert[2]}", expert=int(expert[1]))
    return _Place(f"{before}ffn.router.selection_bias") if rest == _BIAS else None
