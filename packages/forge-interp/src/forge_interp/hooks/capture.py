"""What flowed through chosen sites of a model during the calls inside a `with`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from difflib import get_close_matches
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from forge_interp.attention.call import TENSORS, AttentionCall
from forge_interp.errors import InterpError
from forge_interp.hooks.boards import attached
from forge_interp.hooks.interception import SDPA_ONLY
from forge_interp.hooks.offload import Offload
from forge_interp.hooks.passes import Pass, Stop, passes_of
from forge_interp.hooks.sharding import Spread, is_sharded
from forge_interp.hooks.sites import Site, canonical, find_sites, named_modules
from forge_interp.hooks.taps import Phase, Tap
from forge_interp.hooks.torch_private import is_transformed

Select = Callable[[Tensor], Tensor]
Sink = Callable[[str, Tensor], None]


class _BySite(dict[str, Tensor]):
    """Found under any spelling of a site."""

    def __missing__(self, site: str) -> Tensor:
        if (key := canonical(site)) in self:
            return self[key]
        raise KeyError(f"{key}: no gradient; there are {', '.join(self) or 'none before a backward pass'}")


class Activations(Mapping[str, Tensor]):
    """Captured values by site, `module:part[#call]`; made by `capture`.

    Attributes:
        skipped: sites that a wildcard named and that hold no tensor (a module that returns an object of many,
            a mask that is None), and why.
        gradients: with `grad=True`, after a backward pass, the gradient with respect to each value as the
            model goes on with it from that site; what else uses the same tensor does not count.
    """

    def __init__(
        self,
        sites: dict[str, list[Site]],
        select: Mapping[str, Select],
        grad: bool,
        stop: bool,
        attention_bytes: int,
        offload: Offload,
        sink: Sink | None,
        spread: Spread,
    ) -> None:
        self.gradients: dict[str, Tensor] = _BySite()
        self.skipped: dict[str, str] = {}
        self._named = list(sites)
        self._patterns: dict[str, list[str]] = {}
        for pattern, found in sites.items():
            for site in found:
                self._patterns.setdefault(str(site), []).append(pattern)
        self._select = {
            name: select[chosen[0]]
            for name, named_by in self._patterns.items()
            if (chosen := [pattern for pattern in named_by if pattern in select])
        }
        self._grad = grad
        self._stops = stop
        self._attention_bytes = attention_bytes
        self._offload = offload
        self._sink = sink
        self._spread = spread
        self._values: dict[str, Tensor] = {}
        self._fired: set[str] = set()
        self._seen: set[str] = set()
        self._unchecked: set[str] = set()
        self._keys = frozenset(map(canonical, self._patterns))
        self._awaited = frozenset(self._patterns)
        self._remaining = set(self._awaited)
        self._first: dict[str, int] = {}
        self._is_exact = False
        self._optional: set[str] = set()
        self._objects: dict[int, str] = {}
        self._pass = Pass(self._begin_pass, self._end_pass, self._is_over)
        self._forget_model()

    def __getitem__(self, site: str | nn.Module) -> Tensor:
        site = site if isinstance(site, str) else self._objects.get(id(site), "?")
        key = canonical(site)
        if key in self._values:
            self._offload.wait()
            return self._values[key]
        if key in self._keys:
            raise KeyError(f"{key}: named by the capture, but it has not run since the with began or clear()")
        near = get_close_matches(key, self._values, n=4, cutoff=0.3) or list(self._values)[:8]
        raise KeyError(f"{key}: not captured; there are {', '.join(near) or 'no values yet'}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, site: object) -> bool:
        return isinstance(site, str) and canonical(site) in self._values

    @property
    def fired(self) -> frozenset[str]:
        """The keys of all values since the `with` began or `clear()`, those that went to a sink too."""
        return frozenset(self._fired)

    def wait(self) -> None:
        """Return when all values have arrived, and were given to the sink."""
        self._offload.wait()

    def clear(self) -> None:
        """Forget all values and count calls from 0 again, as between batches."""
        self._values, self.gradients, self._fired, self.skipped = {}, _BySite(), set(), {}
        for tap in self._taps:
            tap.calls = 0
        self._begin_pass()

    def expect(self, keys: Iterable[str]) -> None:
        """From now on each forward pass must give exactly these values, and stops after them if it may.

        For a capture with `stop` or `sink`; call `clear()` before each pass. A pass that gives others, or not
        all, raises InterpError.
        """
        if not self._stops and self._sink is None:
            raise InterpError("expect() of a capture that keeps all; expected one with stop=True or a sink")
        self._awaited, self._is_exact = frozenset(canonical(key) for key in keys), True
        self._begin_pass()

    def _forget_model(self) -> None:
        """Values may be kept for longer than the model."""
        self._taps: list[Tap] = []
        self._is_in_pass: Callable[[nn.Module], bool] = lambda module: True

    def _begin_pass(self) -> None:
        self._remaining = set(self._awaited)
        self._first = {str(tap.site): tap.calls for tap in self._taps}

    def _is_over(self) -> bool:
        return self._stops and not self._remaining

    def _end_pass(self) -> None:
        """Have all values delivered, and compare with what was expected."""
        if self._sink is not None:
            self._offload.wait()
        if self._is_exact and self._fired != self._awaited:
            extra, missing = sorted(self._fired - self._awaited), sorted(self._awaited - self._fired)
            raise InterpError(
                f"a forward pass gave {extra or 'nothing'} too many and {missing or 'nothing'} too few, "
                "expected the same in each: call clear() before each, capture apart what only some reach"
            )

    def _take(self, tapped: str, site: Site, module: nn.Module, value: Any) -> Tensor | None:
        """Keep a copy of a value; with gradients, what the model goes on with in its place."""
        key, replacement = str(site), None
        self._seen.update(self._patterns[tapped])
        if is_transformed(value.output if isinstance(value, AttentionCall) else value):
            raise InterpError(
                f"site {str(site)!r} holds a tensor of torch.func, which means nothing outside; expected a "
                "call of the model outside of vmap, grad and jvp"
            )
        followed = None
        if isinstance(value, AttentionCall):
            query = value.edits["scores"] if value.is_softmax else value.query
            followed = None if site.path[0] in ("k", "v") else query
            value = self._read(value, site)
        if self._grad:
            value, replacement = self._follow(value, module, site, tapped in self._optional)
        kept = self._spread.full(value.detach(), module, site, followed)
        if tapped in self._select:
            kept = self._select[tapped](kept)
        if not isinstance(kept, Tensor):
            raise InterpError(f"select of {key!r} gave {type(kept).__name__}, expected a tensor")
        self._fired.add(key)
        if self._sink is None:
            self._values[key] = self._offload.copy(kept)
        else:
            self._offload.send(kept, partial(self._sink, key))
        if self._is_exact:
            self._remaining.discard(key)
        elif "#" in tapped or (site.call or 0) == self._first.get(tapped, 0):
            self._remaining.discard(tapped)
        if self._is_over() and self._is_in_pass(module):
            raise Stop(self._pass)
        return replacement

    def _skip(self, tapped: str, site: Site, reason: str) -> None:
        """There is no tensor at a site that a wildcard named."""
        self.skipped[str(site)] = reason
        self._remaining.discard(tapped)

    def _read(self, call: AttentionCall, site: Site) -> Tensor:
        """One tensor of an attention call; the first of each site must reproduce the model's own output."""
        name = ".".join(site.path)
        if name not in TENSORS and name not in call.computed:
            check, number = site.module in self._unchecked, site.call or 0
            names = [
                ".".join(tap.site.path)
                for tap in self._taps
                if tap.is_on_attention and tap.site.module == site.module and tap.site.call in (None, number)
            ]
            self._spread.together(partial(call.compute, names, self._attention_bytes, check))
            self._unchecked.discard(site.module)
        return call.read(name, self._attention_bytes)

    def _follow(
        self, value: Tensor, module: nn.Module, site: Site, is_optional: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Have the gradient of a value written down when it is known.

        The model goes on with a copy: the value itself may be used elsewhere, too, or be changed in place.
        Attention cannot be given another one.
        """
        is_attention = site.part == "attn"
        if not torch.is_grad_enabled() or (is_attention and not value.requires_grad):
            raise InterpError(
                f"site {str(site)!r} has no gradient; expected grad mode, as neither no_grad has nor "
                "reentrant checkpointing (use_reentrant=False does), and of attention q, k, v or z in a "
                "graph that reaches it"
            )
        if not (value.is_floating_point() or value.is_complex()):
            if is_optional:
                return value, None
            raise InterpError(f"site {str(site)!r} holds {value.dtype}, which has no gradient; leave it out")
        if not is_attention:
            value = (value if value.requires_grad else value.detach().requires_grad_()).clone()

        def keep(gradient: Tensor) -> None:
            self.gradients[str(site)] = self._spread.full(gradient.detach(), module, site).clone()

        value.register_hook(keep)
        return value, None if is_attention else value

    def _verify(self) -> None:
        missing = [p for p in self._named if p not in self._seen]
        if not missing:
            return
        attention = any(Site.parse(p).part == "attn" for p in missing)
        if self.skipped:
            why = next(iter(self.skipped.values()))
            raise InterpError(f"captured nothing at {', '.join(map(repr, missing))}: {why}")
        raise InterpError(
            f"captured nothing at {', '.join(map(repr, missing))}: the module did not run inside the with "
            "(passed over are ModuleLists, calls of .forward, and what is in a traced or exported program)"
            + (f", or it does not call {SDPA_ONLY}" if attention else "")
        )


@contextmanager
def capture(
    model: nn.Module,
    sites: str | nn.Module | Iterable[str | nn.Module],
    *,
    select: Select | Mapping[str, Select] | None = None,
    grad: bool = False,
    before_edits: bool = False,
    stop: bool = False,
    device: torch.device | str | None = None,
    sink: Sink | None = None,
    check_attention: bool = True,
    attention_bytes: int = 1 << 30,
    max_inflight_bytes: int = 1 << 28,
) -> Iterator[Activations]:
    """Copies of what flows through the sites of a model while the `with` is open.

    Copies are detached and safe from later in-place operations. Values split by tensor parallelism are
    gathered (Collective then: all ranks capture the same sites). Compiled models run eagerly inside.

    Args:
        model: any module.
        sites: `module[:part][#call]` with wildcards, see `forge_interp.hooks.sites`; a module object
            stands for its output.
        select: applied to a value before it is copied, for all sites or by the pattern as given in `sites`.
        grad: also keep gradients, in `.gradients`, of whatever backward pass follows. The model goes on with
            copies of the values: what a module does to its input in place, its caller does not see then.
        before_edits: take values as they were before an `edit` that is active.
        stop: end a forward pass of `model` as soon as each site was seen once in it; it returns None then,
            if there was anything to leave out.
        device: where the copies go; with "cpu" from a GPU through pinned memory, without waiting.
        sink: given key and value in place of keeping it: on the same device the value itself, inside the
            forward pass (copy or consume it there), else the copy once it has arrived, all by the end of the
            forward pass.
        check_attention: at the first call of each module, softmax(scores) V must equal what the model
            computed, before raw, scores, pattern or a statistic is believed.
        attention_bytes: the largest attention matrix to hold at once.
        max_inflight_bytes: how much may be on the way to the CPU before the model waits.

    Raises:
        InterpError: a site names no module, or at the end has captured nothing.
    """
    found = find_sites(model, sites)
    if stop and is_sharded(model):
        raise InterpError(
            "stop=True on an FSDP model: it would stay gathered and use stale weights; leave it out"
        )
    if isinstance(select, Mapping) and (unknown := select.keys() - found.keys()):
        raise InterpError(f"select for {sorted(unknown)}, expected patterns of the capture: {list(found)}")
    chosen = select if isinstance(select, Mapping) else dict.fromkeys(found, select) if select else {}
    offload = Offload(device, max_inflight_bytes)
    acts = Activations(found, chosen, grad, stop, attention_bytes, offload, sink, Spread(model))
    modules = named_modules(model)
    acts._objects = {id(module): name for name, module in modules.items()}
    exact = {str(site) for pattern in found for site in found[pattern] if Site.parse(pattern) == site}
    phase = Phase.BEFORE_EDITS if before_edits else Phase.AFTER_EDITS
    unique = {str(site): site for of_pattern in found.values() for site in of_pattern}
    acts._taps = [
        Tap(site, modules[site.module], partial(acts._take, name), phase, acts)
        for name, site in unique.items()
    ]
    acts._optional = {str(tap.site) for tap in acts._taps} - exact
    for tap in acts._taps:
        if str(tap.site) in acts._optional:
            tap.skip = partial(acts._skip, str(tap.site))
    acts._unchecked = {site.module for site in unique.values()} if check_attention else set()
    with ExitStack() as stack:
        stack.callback(acts._forget_model)
        stack.enter_context(attached(acts._taps))
        if stop or sink is not None:
            acts._is_in_pass = stack.enter_context(passes_of(modules[""], acts._pass))
        stack.enter_context(_explained(model, acts))
        yield acts
        offload.wait()
        acts._verify()


@contextmanager
def _explained(model: nn.Module, acts: Activations) -> Iterator[None]:
    """Say what is wrong where `acts` stopped something else than a forward pass of the model."""
    try:
        yield
    except Stop as stop:
        if stop.of is not acts._pass:
            raise
        raise InterpError(
            f"stop=True ends forward passes of the {type(model).__name__} given to capture, but only a "
            "part of it was called: give that part to capture, or leave stop=True out"
        ) from None
