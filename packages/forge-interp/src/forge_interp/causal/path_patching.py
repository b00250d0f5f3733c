"""Which component influences which directly, with no other between?"""

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from forge_interp.causal.runs import put, run_captured, same_shape, score_edited
from forge_interp.causal.table import Grid, Index, Metric, PatchingTable, Where, at_call, score
from forge_interp.errors import InterpError, check_kind, fitting
from forge_interp.hooks.capture import capture
from forge_interp.hooks.edit import Edit, edit, patch
from forge_interp.hooks.sites import Site, named_modules
from forge_interp.model_inputs import Inputs, call_model
from forge_interp.progress import progress as with_progress


@torch.no_grad()
def path_patching(
    model: nn.Module,
    clean: Inputs,
    corrupted: Inputs,
    senders: str | Iterable[str],
    receivers: str | Iterable[str],
    metric: Metric,
    *,
    frozen: str | Iterable[str],
    where: Where = None,
    receiver_where: Index = ...,
    joint: bool = False,
    progress: bool = True,
) -> PatchingTable:
    """Measure the effect of each sender on each receiver along the paths that pass no frozen site.

    For sender s (or one place of it, by `where`) and receiver r, with a(x) for a in the plain run on x:

    1. Run `corrupted` with s set to s(clean) and every frozen site f set to f(corrupted), and record the
       value of r as r*. With `joint`, each receiver is then set back to r(corrupted), so that nothing passes
       through one receiver to the next. Without, a receiver gets the same r* as when it is listed alone.
    2. Run `corrupted` with r set to r* (at the index `receiver_where`; with `joint` all receivers at once).
       The table holds the metric of this run, [senders, places ..., receivers].

    Sender s and the outputs of the modules in which s is computed are not frozen: its effect must leave
    through them. The frozen sites define "direct": with the outputs of all attention and feed-forward
    modules, only the residual stream and the norms in front of the receiver remain; Wang et al. leave the
    feed-forward modules free, patch receivers jointly, and swap clean and corrupted. Other arguments and
    errors: see `activation_patching`; InterpError also where a sender is a receiver. Costs 3 forward passes,
    and 1 for each place of a sender and for each pair.

    Source: Wang et al. 2022, arXiv:2211.00593, section 3.1 and appendix B; Goldowsky-Dill et al. 2023,
    arXiv:2304.05969.
    """
    check_kind("senders", senders, (str, Iterable), "sites")
    senders = [senders] if isinstance(senders, str) else list(senders)
    acts, clean_score = run_captured(model, clean, senders, metric)
    with (
        capture(model, senders) as of_senders,
        capture(model, receivers) as of_receivers,
        capture(model, frozen) as of_frozen,
    ):
        output = call_model(model, corrupted)
    base, corrupted_score = {**of_senders, **of_receivers, **of_frozen}, score(metric, output)
    receivers, frozen = list(of_receivers), list(of_frozen)
    _check(acts, base, receivers)
    for name in receivers:
        with fitting(base[name], f"receiver_where={receiver_where!r} at {name!r}"):
            _ = base[name][receiver_where]
    around = _modules_around(model, corrupted, acts, frozen)
    grid = Grid.over(acts, where)
    groups = [receivers] if joint else [[name] for name in receivers]
    values = np.full((len(acts), *grid.shape, len(groups)), np.nan)
    places = [(row, site, cell) for row, site in enumerate(acts) for cell in grid.cells()]
    for row, site, cell in with_progress(places, len(places), "path patching", progress):
        sent = put(site, acts[site], grid.index(site, cell))(base[site])
        held = [name for name in frozen if name != site and name not in around[site]]
        edits = {at_call(site): patch(sent)} | {at_call(name): patch(base[name]) for name in held}
        back = {name: base[name] for name in receivers if joint or name in held}
        received = _received(model, corrupted, edits, receivers, back)
        for column, group in enumerate(groups):
            edits = {at_call(name): patch(received[name][receiver_where], receiver_where) for name in group}
            values[(row, *cell, column)] = score_edited(model, corrupted, edits, metric)
    axes, labels = (*grid.axes, "receiver"), (*grid.labels, tuple(map(" + ".join, groups)))
    return replace(grid, axes=axes, labels=labels).table(values, acts, clean_score, corrupted_score)


def _check(acts: Mapping[str, Tensor], base: Mapping[str, Tensor], receivers: Iterable[str]) -> None:
    if both := [site for site in receivers if site in acts]:
        raise InterpError(
            f"{', '.join(both)} are senders and receivers; expected different sites: a module receives at "
            "its input (:in) and sends at its output (:out)"
        )
    if missing := [site for site in acts if site not in base]:
        raise InterpError(f"{', '.join(missing)} ran on the clean inputs only; expected them in both runs")
    for site, value in acts.items():
        same_shape(site, value, base[site])


def _modules_around(
    model: nn.Module, corrupted: Inputs, senders: Iterable[str], frozen: Iterable[str]
) -> dict[str, set[str]]:
    """Return, for each sender, the frozen outputs of the modules that run when its value appears."""
    modules, sites = named_modules(model), {name: Site.parse(name) for name in frozen}
    outputs = {(site.module, site.call or 0): name for name, site in sites.items() if site.part == "out"}
    running: list[tuple[str, int]] = []
    calls: Counter[str] = Counter()
    found: dict[str, set[str]] = {}

    def note(sender: str) -> Edit:
        def apply(value: Tensor) -> Tensor:
            found[sender] = {outputs[call] for call in running if call in outputs}
            return value

        return apply

    with ExitStack() as stack:
        for name in {name for name, _ in outputs}:

            def enter(module: nn.Module, args: Any, name: str = name) -> None:
                running.append((name, calls[name]))
                calls[name] += 1

            def leave(module: nn.Module, args: Any, output: Any) -> None:
                running.pop()

            stack.callback(modules[name].register_forward_pre_hook(enter).remove)
            stack.callback(modules[name].register_forward_hook(leave).remove)
        with edit(model, {at_call(sender): note(sender) for sender in senders}):
            call_model(model, corrupted)
    return found


def _received(
    model: nn.Module,
    corrupted: Inputs,
    edits: Mapping[str, Edit],
    receivers: Iterable[str],
    back: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Return the receivers' inputs under the edits; receivers in `back` are set to its values at once."""
    received: dict[str, Tensor] = {}

    def note(site: str) -> Edit:
        def apply(old: Tensor) -> Tensor:
            received[site] = old.clone()
            return back[site].clone() if site in back else old

        return apply

    own = {at_call(site): note(site) for site in receivers}
    with edit(model, {**edits, **own}):
        call_model(model, corrupted)
    return received
