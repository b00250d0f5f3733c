"""Vision transformers built of parts of forge-model. n images, N patches of one, P of all, D width."""

from __future__ import annotations

from typing import ClassVar

import torch
from forge_model.attention.mask import Mask, softmax_attention
from forge_model.config import LayerConfig
from forge_model.decoder.block import Block
from forge_model.decoder.context import Context
from forge_model.init import Init
from forge_model.layers import Linear
from forge_model.model import Model
from forge_model.roles import Role
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from forge_vlm.encoders.config import TowerConfig
from forge_vlm.encoders.positions import Positions, images_of


class Scale(nn.Module):
    """A learnt factor for each channel (arXiv:2103.17239)."""

    roles: ClassVar[dict[str, Role]] = {"weight": "norm"}

    def __init__(self, dim: int, initial: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.initial = {"weight": Init("constant", initial)}

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return x * self.weight


class ScaledBlock(Block):
    """x + scale(attention(norm(x))), then the same with the feed-forward."""

    def __init__(self, layer: LayerConfig, dim: int, initial: float) -> None:
        super().__init__(layer, dim)
        self.attention_post_norm, self.ffn_post_norm = Scale(dim, initial), Scale(dim, initial)


class ClassToken(nn.Module):
    """A learnt vector before the patches of an image."""

    roles: ClassVar[dict[str, Role]] = {"weight": "embedding"}

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        """[n, N, D] -> [n, 1 + N, D]; `position` [1, D] is added to the token."""
        return torch.cat([(self.weight + position).expand(len(x), 1, -1), x], 1)


class Tower(Model):
    """Patches, positions, blocks in which patches see all of their own image only, and a norm.

    If none of its parameters is trained, nothing is saved for a backward pass: pixels need no gradient.
    """

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        self.config, self.depth, dim = config, config.num_layers, config.dim
        self.init_std = config.init_std
        layer = config.layer()
        self.patches = Linear(3 * config.patch_size**2, dim, bias=config.has_patch_bias)
        self.positions = Positions(
            config.position_side, int(config.has_class_token), dim, config.resize_positions
        )
        self.class_token = ClassToken(dim) if config.has_class_token else None
        self.pre_norm = layer.norm.build(dim) if config.has_pre_norm else None
        self.layers = nn.ModuleDict({str(i): layer.block.build(layer, dim) for i in range(config.num_layers)})
        self.norm = layer.norm.build(dim)
        for block in list(self.layers.values())[config.depth :]:
            block.requires_grad_(False)
        self.norm.requires_grad_(config.normalizes)

    def forward(self, patches: Tensor, grids: Tensor) -> Tensor:
        """Return the features of all images in their order.

        Args:
            patches: [P, 3 p p] uint8.
            grids: [n, 3] frames, rows, columns of each image, on the host; sizes may differ.

        Returns:
            [P, width]; plus one row before those of each image if the class token is kept.
        """
        images = images_of(grids)
        sizes = [rows * columns for rows, columns in images]
        x, hidden = self.positions(self.patches(self.normalized(patches)), images), None
        if len(set(images)) == 1:
            x = x.unflatten(0, (len(images), sizes[0]))
        else:
            x = pad_sequence(list(x.split(sizes)), batch_first=True)
            index = torch.arange(x.shape[1], device=x.device)
            hidden = torch.stack([index >= size for size in sizes]).long()  # no copy from the host
        if self.class_token is not None:
            x = self.class_token(x, self.positions(x.new_zeros(1, x.shape[-1]), ()))
            hidden = None if hidden is None else torch.cat([hidden[:, :1] * 0, hidden], 1)
        features = self._features(x if self.pre_norm is None else self.pre_norm(x), hidden)
        if self.class_token is not None and not self.config.extra:
            features = features[:, 1:]
        if hidden is None:
            return features.flatten(0, 1)
        return torch.cat([one[: size + self.config.extra] for one, size in zip(features, sizes, strict=True)])

    def _features(self, x: Tensor, doc_ids: Tensor | None) -> Tensor:
        """[n, N, D] -> [n, N, width]; tokens see only tokens with their own id."""
        context = Context(
            None, softmax_attention.resolve(Mask(x.shape[1], x.device, doc_ids, causal=False), None)
        )
        states = len(self.layers) + 1
        chosen = [layer % states for layer in self.config.chosen_layers]
        found = {0: x} if 0 in chosen else {}
        for number, block in enumerate(self.layers.values(), 1):
            if number > max(chosen):
                break
            x = block(x, context)
            if number in chosen:
                found[number] = x
        features = [self.norm(found[one]) if self.config.normalizes else found[one] for one in chosen]
        return features[0] if len(features) == 1 else torch.cat(features, -1)

    def blocks(self) -> dict[str, nn.Module]:
        """See `Model.blocks`."""
        return {f"layers.{name}": block for name, block in self.layers.items()}

    def normalized(self, patches: Tensor) -> Tensor:
        """Normalize pixels as in the training of the tower, in the dtype of its weights."""
        # made on the device: a copy from the host would wait for it
        mean, std = (
            torch.cat([torch.full((1,), value, device=patches.device) for value in values])
            for values in (self.config.mean, self.config.std)
        )
        pixels = patches.unflatten(-1, (-1, 3)).float() / 255
        return ((pixels - mean) / std).flatten(-2).to(self.patches.weight.dtype)
