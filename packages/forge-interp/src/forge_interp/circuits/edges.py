"""Which edges between parts explain the difference of the clean run from the corrupted run?

An edge leads from a part that adds to the residual stream (a sender) to a part that reads the stream (a
receiver, mostly a norm). Letters: B batch, T tokens, D model dim, N heads, S senders, R receivers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from forge_interp.causal.attribution import gradients_at, line_nodes
from forge_interp.causal.runs import run_captured, same_shape
from forge_interp.causal.table import Metric, at_call, score
from forge_interp.errors import InterpError
from forge_interp.hooks.capture import capture
from forge_interp.hooks.edit import Edit, edit
from forge_interp.model_inputs import Inputs, call_model

Edge = tuple[str, str]


@dataclass(frozen=True)
class EdgeScores:
    """Estimated effect on the metric of each edge that carries the clean value; NaN: no such edge."""

    values: np.ndarray  # [S, R]
    senders: tuple[str, ...]  # sites, in the order of the run; of heads `site[3]`
    receivers: tuple[str, ...]
    clean: float  # the metric of the clean run
    corrupted: float
    fed: Mapping[str, str | None] = field(repr=False)  # the receiver that each sender is computed from
    weights: np.ndarray = field(repr=False)  # [S, R], the factor with which a receiver reads a sender

    def edges(self, count: int | None = None) -> list[Edge]:
        """Return the edges with the largest absolute effects, the largest first; by default all."""
        order = np.argsort(-np.abs(self.values), axis=None, kind="stable")  # NaN comes last
        cells = np.stack(np.unravel_index(order, self.values.shape), 1)[: int((~np.isnan(self.values)).sum())]
        return [(self.senders[row], self.receivers[column]) for row, column in cells[:count]]

    def circuit(self, count: int) -> list[Edge]:
        """Return the `count` largest edges, without those on no path from an unfed sender to the end."""
        kept, before = set(self.edges(count)), None
        while kept != before:
            before, reached, used = kept, {r for _, r in kept}, {self.fed[s] for s, _ in kept}
            kept = {(s, r) for s, r in kept if self.fed[s] is None or self.fed[s] in reached}
            kept = {(s, r) for s, r in kept if r == self.receivers[-1] or r in used}
        return [edge for edge in self.edges(count) if edge in kept]


def edge_attribution(
    model: nn.Module,
    clean: Inputs,
    corrupted: Inputs,
    senders: str | Iterable[str],
    receivers: str | Iterable[str],
    metric: Metric,
    *,
    heads: Mapping[str, Tensor] | None = None,
    steps: int | None = None,
) -> EdgeScores:
    """Estimate the effect of every edge: (clean - corrupted of the sender) times the receiver's gradient.

    The gradient is that of the corrupted run with respect to the receiver's input alone. Costs 2 forward
    passes and 1 with its backward pass; `steps` (integrated gradients) makes `steps` of the latter, along the
    straight line from the corrupted to the clean output of the first sender. One more forward pass, with
    senders and receivers cut apart, shows which edges exist (in a parallel block none from attention to MLP)
    and their factors (such as the residual multiplier of Granite).

    Args:
        model: any module.
        clean: inputs whose behaviour is explained, see `activation_patching`.
        corrupted: inputs of the same shapes.
        senders: sites [B, T, D] that are added to the residual stream as they are, such as
            ["embed", "layers.*.attention", "layers.*.mlp"]; or sites `attn.z` in `heads`.
        receivers: sites [B, T, D] that read it, such as "layers.*.input_layernorm:in" and "norm:in".
        metric: function from the model's output to one number, with a gradient.
        heads: W_O [N, H, D] by site `attn.z`: then each head is a sender. See `head_weights`.
        steps: number of points of EAP-IG.

    InterpError as in `attribution_patching`, and where a receiver does not read a sender as a term of a sum:
    a norm or a part that is not named lies between them.

    Source: Syed et al. 2023, arXiv:2310.10348 (EAP); Hanna et al. 2024, arXiv:2403.17806 (EAP-IG).
    """
    heads, (sent, read) = heads or {}, _in_order(model, clean, senders, receivers)
    ends = [_run(model, inputs, sent, metric, heads) for inputs in (clean, corrupted)]
    (there, clean_score), (here, corrupted_score) = ends
    for name, value in there.items():
        same_shape(name, value, here[name])
    first, total = next(iter(here)), dict.fromkeys(read, 0.0)
    for place, weight in [(0.0, 1.0)] if steps is None else line_nodes(steps):
        point = here[first] + place * (there[first] - here[first])
        points = {} if steps is None else {first: point}
        gradients, *_ = gradients_at(model, corrupted, metric, read, points)
        total = {site: total[site] + weight * gradients[site].double() for site in read}
    fed, factors = _connections(model, corrupted, sent, read, heads)
    weights = np.array([factors[name.partition("[")[0]] for name in here])
    values = weights.copy()
    for row, name in enumerate(here):
        change = there[name].double() - here[name].double()
        for column, site in enumerate(total):
            if not np.isnan(weights[row, column]):
                values[row, column] *= (change * total[site]).sum().item()
    fed = {name: fed[name.partition("[")[0]] for name in here}
    return EdgeScores(values, tuple(here), tuple(total), clean_score, corrupted_score, fed, weights)


@torch.no_grad()
def faithfulness(
    model: nn.Module,
    clean: Inputs,
    corrupted: Inputs,
    scores: EdgeScores,
    metric: Metric,
    circuits: Iterable[Collection[Edge]],
    *,
    heads: Mapping[str, Tensor] | None = None,
) -> np.ndarray:
    """Return the share of the metric that each circuit keeps, [circuits]: 1 is all, 0 as the corrupted run.

    Each circuit costs one run of `clean`, in which receivers read the corrupted outputs of senders outside of
    the circuit; the share is (metric - corrupted) / (clean - corrupted). `[scores.circuit(n) for n in ...]`
    makes the curve over the number of edges; edges to receivers that are not in `scores` are never cut.
    """
    heads, found = heads or {}, []
    names = list(dict.fromkeys(name.partition("[")[0] for name in scores.senders))
    here, _ = _run(model, corrupted, names, metric, heads)
    gap = scores.clean - scores.corrupted
    if not gap:
        raise InterpError(f"clean and corrupted metric are {scores.clean}; expected two values")
    for circuit in circuits:
        now: dict[str, Tensor] = {}

        def send(site: str, now: dict[str, Tensor] = now) -> Edit:
            def apply(value: Tensor) -> Tensor:
                now.update(_written(site, value, heads))
                return value

            return apply

        def receive(site: str, now: dict[str, Tensor] = now, kept: Collection[Edge] = circuit) -> Edit:
            factors = zip(
                scores.senders, scores.weights[:, scores.receivers.index(site)].tolist(), strict=True
            )
            cut = {name: w for name, w in factors if w == w and (name, site) not in kept}
            return lambda value: value - sum(w * (now[name] - here[name]) for name, w in cut.items())

        edits = {at_call(name): send(name) for name in names}
        with edit(model, edits | {at_call(site): receive(site) for site in scores.receivers}):
            found.append((score(metric, call_model(model, clean)) - scores.corrupted) / gap)
    return np.array(found)


@torch.no_grad()
def _in_order(
    model: nn.Module, inputs: Inputs, senders: str | Iterable[str], receivers: str | Iterable[str]
) -> tuple[list[str], list[str]]:
    """Return the sites of senders and of receivers in the order of the run."""
    patterns = [[x] if isinstance(x, str) else list(x) for x in (senders, receivers)]
    with (
        capture(model, patterns[0]) as sent,
        capture(model, patterns[1]) as read,
        capture(model, [*patterns[0], *patterns[1]]) as both,
    ):
        call_model(model, inputs)
    first, second = ([site for site in both if site in set(kind)] for kind in (sent, read))
    return first, second


def _connections(
    model: nn.Module, inputs: Inputs, sent: list[str], read: list[str], heads: Mapping[str, Tensor]
) -> tuple[dict[str, str | None], dict[str, list[float]]]:
    """Return the receiver that feeds each sender, and each sender's factors at all receivers (NaN: no edge).

    In a run where each sender and receiver starts its own graph, only the residual stream connects them.
    """
    made: dict[str, Tensor] = {}
    starts: dict[str, Tensor] = {}

    def cut(site: str) -> Edit:
        def apply(value: Tensor) -> Tensor:
            made[site], starts[site] = value, value.detach().clone().requires_grad_()
            return starts[site].clone()

        return apply

    def gradients(site: str, along: Tensor, at: list[str]) -> dict[str, Tensor | None]:
        if not made[site].requires_grad:
            return dict.fromkeys(at)
        leaves = [starts[name] for name in at]
        found = torch.autograd.grad(made[site], leaves, along, retain_graph=True, allow_unused=True)
        return dict(zip(at, found, strict=True))

    with torch.enable_grad(), edit(model, {at_call(site): cut(site) for site in (*sent, *read)}):
        call_model(model, inputs)
        fed: dict[str, str | None] = {}
        for site in sent:
            found = gradients(site, torch.ones_like(made[site]), read)
            fed[site] = next((name for name in reversed(read) if found[name] is not None), None)
        factors: dict[str, list[float]] = {site: [] for site in sent}
        for site in read:
            random = torch.randn(made[site].shape, generator=torch.Generator().manual_seed(0)).to(made[site])
            for sender, gradient in gradients(site, random, sent).items():
                factors[sender].append(_factor((sender, site), gradient, random, heads.get(sender)))
    return fed, factors


def _factor(edge: Edge, gradient: Tensor | None, along: Tensor, output: Tensor | None) -> float:
    """Return the factor between the gradients of a sum and of its term; NaN without a gradient."""
    if gradient is None or not bool(gradient.any()):
        return float("nan")
    if output is not None:
        along = torch.einsum("btd,nhd->bnth", along, output.to(along))
    try:
        given, wanted = gradient.double(), along.double().sum_to_size(gradient.shape)
    except RuntimeError as error:
        raise InterpError(f"{edge[0]!r} does not fit {edge[1]!r} ({error}); expected [B, T, D]") from None
    factor = ((given * wanted).sum() / wanted.square().sum()).item()
    close = 1e-3 if gradient.dtype in (torch.float32, torch.float64) else 5e-2
    if not bool((given - factor * wanted).abs().max() <= close * abs(factor) * wanted.abs().max()):
        raise InterpError(
            f"{edge[1]!r} reads {edge[0]!r} in other ways than as a term of a sum; expected senders that are "
            "added as they are (behind a norm name the norm), receivers that are inputs of norms, the W_O of "
            "heads, and all that lies between named as a receiver"
        )
    return factor


@torch.no_grad()
def _run(
    model: nn.Module, inputs: Inputs, senders: list[str], metric: Metric, heads: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], float]:
    """Return the output of each sender, and the metric."""
    acts, value = run_captured(model, inputs, senders, metric)
    return {name: x for site in acts for name, x in _written(site, acts[site], heads).items()}, value


def _written(site: str, value: Tensor, heads: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the [B, T, D] that each sender at a site adds to the residual stream."""
    if site not in heads:
        return {site: value}
    made = torch.einsum("bnth,nhd->nbtd", value, heads[site].to(value))
    return {f"{site}[{head}]": part for head, part in enumerate(made)}
