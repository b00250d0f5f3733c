"""Which values flowed through chosen sites of a model during the calls inside a `with`?"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from forge_interp.attention.call import TENSORS, AttentionCall, Check
from forge_interp.errors import InterpError, check_kind
from forge_interp.hooks.engine.attend import not_called
from forge_interp.hooks.engine.boards import attached
from forge_interp.hooks.engine.offload import Offload
from forge_interp.hooks.engine.passes import Stop, passes_of
from forge_interp.hooks.engine.sharding import Spread, is_sharded
from forge_interp.hooks.engine.taps import Phase, Tap
from forge_interp.hooks.engine.torch_private import is_transformed
from forge_interp.hooks.sites import BySite, Site, canonical, find_sites, named_modules

Select = Callable[[Tensor], Tensor]
Sink = Callable[[str, Tensor], None]


@dataclass(frozen=True)
class _Options:
    """The arguments of `capture`."""

    select: Mapping[str, Select]
    grad: bool
    before_edits: bool
    stop: bool
    sink: Sink | None
    check: Check  # of calls of attention but the first of each module
    attention_bytes: int
    offload: Offload


class Activations(BySite):
    """Captured values by site, `module:part[#call]`; made by `capture`.

    `skipped` maps sites of wildcards without a tensor to the reason. `gradients`, with `grad=True` after a
    backward pass, are those with respect to the value that the model continues with after the site; other
    uses of the same tensor do not count.
    """

    def __init__(self, model: nn.Module, found: Mapping[str, list[Site]], options: _Options) -> None:
        super().__init__()
        self.gradients = BySite()
        self.skipped: dict[str, str] = {}
        self._options, self._spread = options, Spread(model)
        self._fired: set[str] = set()
        self._seen: set[str] = set()  # patterns
        self._is_in_pass: Callable[[nn.Module], bool] = lambda module: True
        self._patterns: dict[str, list[str]] = {}  # that name a site
        sites = {str(site): site for of_pattern in found.values() for site in of_pattern}
        for pattern, site in ((pattern, site) for pattern, of in found.items() for site in of):
            self._patterns.setdefault(str(site), []).append(pattern)
        self._exact = {name for name, site in sites.items() if site in map(Site.parse, self._patterns[name])}
        self._unchecked = {site.module for site in sites.values() if options.check != "nothing"}
        modules = named_modules(model)
        self._objects = {id(module): name for name, module in modules.items()}
        phase = Phase.BEFORE_EDITS if options.before_edits else Phase.AFTER_EDITS
        self._taps: list[Tap] = []
        for name, site in sites.items():
            skip = None if name in self._exact else partial(self._skip, name)
            self._taps.append(Tap(site, modules[site.module], partial(self._take, name), phase, self, skip))
        self._keys = frozenset(map(canonical, sites))
        self._awaited, self._is_exact = frozenset(sites), False
        self.begin_pass()

    def __getitem__(self, site: str | nn.Module) -> Tensor:
        site = site if isinstance(site, str) else self._objects.get(id(site), "?")
        key = canonical(site)
        if key in self._keys and key not in self._values:
            raise KeyError(f"{key}: named by the capture, but it has not run since the with began or clear()")
        self._options.offload.wait()
        return super().__getitem__(key)

    @property
    def fired(self) -> frozenset[str]:
        """The keys of all values since the `with` began or `clear()`, also of values that went to a sink."""
        return frozenset(self._fired)

    def clear(self) -> None:
        """Drop all values and count calls from 0 again, as between batches."""
        self._values, self.gradients, self._fired, self.skipped = {}, BySite(), set(), {}
        for tap in self._taps:
            tap.calls = 0
        self.begin_pass()

    def expect(self, keys: Iterable[str]) -> None:
        """Require exactly these values in each later forward pass; with `stop`, a pass ends after them.

        For a capture with `stop` or `sink`; call `clear()` before each pass. Other values raise InterpError.
        """
        if not self._options.stop and self._options.sink is None:
            raise InterpError("expect() of a capture that keeps all; expected one with stop=True or a sink")
        self._awaited, self._is_exact = frozenset(canonical(key) for key in keys), True
        self.begin_pass()

    def begin_pass(self) -> None:
        """Begin a forward pass of the model."""
        self._remaining = set(self._awaited)
        self._first = {str(tap.site): tap.calls for tap in self._taps}

    def is_over(self) -> bool:
        """Whether the rest of the pass may be left out."""
        return self._options.stop and not self._remaining

    def end_pass(self) -> None:
        """End a pass: compare its values with the expected ones."""
        if self._is_exact and self._fired != self._awaited:
            extra, missing = sorted(self._fired - self._awaited), sorted(self._awaited - self._fired)
            raise InterpError(
                f"a forward pass gave {extra or 'nothing'} too many and {missing or 'nothing'} too few, "
                "expected the same in each: call clear() before each, capture apart what only some reach"
            )

    def _take(self, tapped: str, site: Site, module: nn.Module, value: Any) -> Tensor | None:
        """Keep a copy of a value; with gradients, return the tensor with which the model continues."""
        key, replacement, followed, options = str(site), None, None, self._options
        patterns = self._patterns[tapped]
        self._seen.update(patterns)
        if is_transformed(value.output if isinstance(value, AttentionCall) else value):
            raise InterpError(
                f"site {key!r} holds a tensor of torch.func; call the model outside of vmap, grad, jvp"
            )
        if isinstance(value, AttentionCall):
            query = value.edits["scores"] if value.is_softmax else value.query
            followed = None if site.path[0] in ("k", "v") else query
            value = self._read(value, site)
        if options.grad:
            value, replacement = self._follow(value, module, site, tapped not in self._exact)
        kept = self._spread.full(value.detach(), module, site, followed)
        select = next((options.select[pattern] for pattern in patterns if pattern in options.select), None)
        kept = kept if select is None else select(kept)
        if not isinstance(kept, Tensor):
            raise InterpError(f"select of {key!r} gave {type(kept).__name__}, expected a tensor")
        self._fired.add(key)
        if options.sink is None:
            # Scores and what follows from them were made for this capture: nothing changes them later.
            is_own = site.part == "attn" and site.path[0] not in TENSORS and not options.grad
            is_own &= not kept.is_inference() and select is None
            self._values[key] = options.offload.kept(kept) if is_own else options.offload.copy(kept)
        else:
            options.offload.send(kept, partial(options.sink, key))
        if self._is_exact:
            self._remaining.discard(key)
        elif "#" in tapped or (site.call or 0) == self._first[tapped]:  # a call inside it ends earlier
            self._remaining.discard(tapped)
        if self.is_over() and self._is_in_pass(module):
            raise Stop(self)
        return replacement

    def _skip(self, tapped: str, site: Site, reason: str) -> None:
        """Record that a site of a wildcard has no tensor."""
        self.skipped[str(site)] = reason
        self._remaining.discard(tapped)

    def _read(self, call: AttentionCall, site: Site) -> Tensor:
        """Return one tensor of an attention call, whose weights must reproduce the model's output."""
        name = ".".join(site.path)
        if name not in TENSORS and name not in call.computed:
            check, number = "all" if site.module in self._unchecked else self._options.check, site.call or 0
            names = [
                ".".join(tap.site.path)
                for tap in self._taps
                if tap.is_on_attention and tap.site.module == site.module and tap.site.call in (None, number)
            ]
            self._spread.together(partial(call.compute, names, self._options.attention_bytes, check))
            self._unchecked.discard(site.module)
        return call.read(name, self._options.attention_bytes)

    def _follow(
        self, value: Tensor, module: nn.Module, site: Site, is_optional: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Record the gradient of a value in the backward pass.

        The model continues with a copy (not for attention), as the value may be shared or changed in place.
        """
        is_attention = site.part == "attn"
        if not torch.is_grad_enabled() or (is_attention and not value.requires_grad):
            raise InterpError(
                f"site {str(site)!r} has no gradient; expected grad mode, as neither no_grad has nor "
                "reentrant checkpointing (use_reentrant=False does), and of attention q, k, v or z in a graph"
            )
        if not (value.is_floating_point() or value.is_complex()):
            if is_optional:
                return value, None
            raise InterpError(f"site {str(site)!r} holds {value.dtype}, which has no gradient; leave it out")
        if not is_attention:
            value = (value if value.requires_grad else value.detach().requires_grad_()).clone()

        def keep(gradient: Tensor) -> None:
            self.gradients.put(str(site), self._spread.full(gradient.detach(), module, site).clone())

        value.register_hook(keep)
        return value, None if is_attention else value

    def _verify(self, model: nn.Module) -> None:
        named = dict.fromkeys(pattern for patterns in self._patterns.values() for pattern in patterns)
        missing = [pattern for pattern in named if pattern not in self._seen]
        if not missing:
            return
        why = (
            "the module did not run inside the with (passed over are ModuleLists, calls of .forward, and "
            "what is in a traced or exported program)"
        )
        if any(Site.parse(p).part == "attn" for p in missing):
            why += f", or it does not call {not_called(model)}"
        why = next(iter(self.skipped.values()), why)
        raise InterpError(f"captured nothing at {', '.join(map(repr, missing))}: {why}")


def by_pattern(select: Select | Mapping[str, Select] | None, patterns: Iterable[str]) -> dict[str, Select]:
    """Return the `select` of each pattern that has one; InterpError for other patterns."""
    for function in select.values() if isinstance(select, Mapping) else [select] if select else ():
        check_kind("select", function, Callable, "a function of the value, or one by pattern")
    if not isinstance(select, Mapping):
        return dict.fromkeys(patterns, select) if select else {}
    if unknown := sorted(select.keys() - set(patterns)):
        raise InterpError(
            f"select is given for {unknown}; expected patterns among the sites: {list(patterns)}"
        )
    return dict(select)


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
) -> Iterator[Activations]:
    """Copy the values at the sites of a model while the `with` is open.

    Copies are detached and safe from later in-place operations. Values split by tensor parallelism are
    gathered (then Collective, with the same sites on all ranks). Compiled models run eagerly inside.
    InterpError where a site names no module, or has captured nothing.

    Args:
        model: any module.
        sites: `module[:part][#call]` with wildcards, see `forge_interp.hooks.sites`; a module object
            stands for its output.
        select: applied to a value before it is copied, for all sites or by the pattern as in `sites`.
        grad: also keep gradients, in `.gradients`. The model continues with copies of the values: a caller
            does not see what a module does to its input in place.
        before_edits: take values as they were before an active `edit`.
        stop: end a forward pass of `model` after all sites; it returns None then, if it left anything out.
        device: device of the copies; from a GPU to "cpu" through pinned memory, without waiting.
        sink: function that takes key and value inside the forward pass: on the same device the value itself
            (copy or consume it there), else its copy after it has arrived. Nothing is kept.
        check_attention: compare softmax(scores) V with the model's output before raw, scores, pattern or a
            statistic is returned: all of the first call of each module, then two queries of each call.
        attention_bytes: size limit of an attention matrix in memory.
    """
    found, offload = find_sites(model, sites), Offload(device)
    if stop and is_sharded(model):
        raise InterpError("stop=True on an FSDP model leaves its weights gathered and stale; leave stop out")
    check: Check = "some" if check_attention else "nothing"
    options = _Options(
        by_pattern(select, found), grad, before_edits, stop, sink, check, attention_bytes, offload
    )
    acts = Activations(model, found, options)
    with ExitStack() as stack:
        stack.callback(vars(acts).update, _taps=[], _is_in_pass=None)  # values may outlive the model
        stack.enter_context(attached(acts._taps))
        if stop or sink is not None:
            acts._is_in_pass = stack.enter_context(passes_of(named_modules(model)[""], acts))
        try:
            yield acts
        except Stop as early:
            if early.of is not acts:
                raise
            raise InterpError(
                f"stop=True ends passes of the {type(model).__name__} given, but only a part of it was "
                "called: give that part to capture, or leave stop=True out"
            ) from None
        offload.wait()
        acts._verify(model)


@contextmanager
def each_attention(
    model: nn.Module, modules: str | Iterable[str], look: Callable[[str, AttentionCall], None]
) -> Iterator[None]:
    """Pass every call of scaled dot-product attention, after edits, to a function; nothing is kept.

    `modules` are names with wildcards, such as `**.self_attn`; of nested ones only the innermost counts.
    `look` takes the name of the module (`name#k` from its second call on) and the call, which holds the
    model's own tensors (under tensor parallelism those of this rank's heads): read them, and keep no
    reference. InterpError where a name fits no module, or no module called attention inside the `with`.
    """
    found, by_name = find_sites(model, modules), named_modules(model)
    seen: set[str] = set()

    def act(site: Site, module: nn.Module, call: AttentionCall) -> None:
        seen.add(site.module)
        look(str(site).replace(":attn", ""), call)

    sites = {site.module: replace(site, part="attn", path=()) for of in found.values() for site in of}
    with attached([Tap(site, by_name[name], act, Phase.AFTER_EDITS, seen) for name, site in sites.items()]):
        yield
    if not seen:
        raise InterpError(f"none of {', '.join(found)} called {not_called(model)}")
