"""How every attention call of chosen modules is looked at while it happens, without keeping it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor, nn

from forge_interp.attention.call import AttentionCall
from forge_interp.errors import InterpError
from forge_interp.hooks.boards import attached
from forge_interp.hooks.interception import SDPA_ONLY
from forge_interp.hooks.sites import Site, find_sites, named_modules
from forge_interp.hooks.taps import Phase, Tap


@contextmanager
def each_attention(
    model: nn.Module, modules: str | Iterable[str], look: Callable[[str, AttentionCall], None]
) -> Iterator[None]:
    """Show every call of scaled dot-product attention to a function, as edits left it.

    Args:
        model: any module.
        modules: names with wildcards, such as `**.self_attn`; of nested ones the innermost is told.
        look: given the name of the module (`name#k` for its k-th call but the first) and the call, which
            holds the model's own tensors: read what is needed, keep no reference.

    Raises:
        InterpError: a name fits no module, or no module called attention inside the `with`.
    """
    found, by_name = find_sites(model, modules), named_modules(model)
    seen: set[str] = set()

    def act(site: Site, module: nn.Module, call: AttentionCall) -> Tensor | None:
        seen.add(site.module)
        look(str(site).replace(":attn", ""), call)
        return None

    sites = {site.module: replace(site, part="attn", path=()) for of in found.values() for site in of}
    with attached([Tap(site, by_name[name], act, Phase.AFTER_EDITS, seen) for name, site in sites.items()]):
        yield
    if not seen:
        raise InterpError(f"none of {', '.join(found)} called {SDPA_ONLY}")
