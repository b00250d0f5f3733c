"""How is a call of attention in an unchanged model intercepted and passed to taps?"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from forge_interp.attention.call import AttentionCall
from forge_interp.attention.flex import as_sdpa, flex_result, is_flex
from forge_interp.attention.lineage import Lineage, product_with_values
from forge_interp.hooks.engine.taps import Phase, Tap
from forge_interp.hooks.engine.torch_private import function_modes
from forge_interp.hooks.sites import ATTENTION_TENSORS

Attend = Callable[..., Tensor]
"""Function from (the original function, its args, its kwargs, their lineage) to the result."""
_SDPA = F.scaled_dot_product_attention
_NAME = threading.RLock()


class Interception(TorchFunctionMode):
    """While active, passes each attention of this thread to a function.

    Attention is `F.scaled_dot_product_attention`, and products of a softmax over keys with values. A mode
    sees `nn.MultiheadAttention` as a single function: inside it, the name of the former is replaced.
    """

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self._attend = attend
        self._lineage = Lineage()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `TorchFunctionMode`."""
        kwargs = kwargs or {}
        if func is _SDPA or self._lineage.weights(func, args) is not None:
            return self._attend(func, args, kwargs, self._lineage)
        if is_flex(func, args):
            return flex_result(self._attend(func, args, kwargs, self._lineage))
        if func is F.multi_head_attention_forward:
            with _exchanged(partial(self._attend, lineage=self._lineage)):
                return func(*args, **kwargs)
        result = func(*args, **kwargs)
        self._lineage.note(func, args, kwargs, result)
        return result


def not_called(model: nn.Module) -> str:
    """Explain why a module has no attention to capture, and what to do in this model."""
    modules, advice = list(model.modules()), list[str]()
    if any(hasattr(module, "set_attn_implementation") for module in modules):
        advice += ["call model.set_attn_implementation('sdpa') or 'eager'"]
    if any(isinstance(module, nn.MultiheadAttention) for module in modules):
        advice += ["call nn.MultiheadAttention with need_weights=False, or it computes its own softmax"]
    return (
        "F.scaled_dot_product_attention, where attention is seen, nor a softmax and its product with values"
        f"{': ' if advice else ''}{'; '.join(advice)}; linear attention, FlexAttention with a score_mod, "
        "einsum, and a softmax of another shape have no such path: capture the projections of the module"
    )


def is_intercepted() -> bool:
    """Whether an `Interception` is active on this thread."""
    return any(isinstance(mode, Interception) for mode in function_modes())


@contextmanager
def _exchanged(attend: Attend) -> Iterator[None]:
    """Replace the name `F.scaled_dot_product_attention`; all threads see it, and one at a time may do it."""
    with _NAME:
        before = F.scaled_dot_product_attention
        F.scaled_dot_product_attention = lambda *args, **kwargs: attend(before, args, kwargs)
        try:
            yield
        finally:
            F.scaled_dot_product_attention = before


def serve(
    taps: list[Tap], attention: Callable[..., Tensor], args: tuple, kwargs: dict[str, Any], lineage: Lineage
) -> AttentionCall:
    """Run one attention call through taps; the model continues with the output of the returned call."""
    edits, early, late = (
        [tap for tap in taps if tap.phase is phase]
        for phase in (Phase.EDIT, Phase.BEFORE_EDITS, Phase.AFTER_EDITS)
    )
    if is_flex(attention, args):
        attention, args, kwargs = as_sdpa(attention, args)
    softmax = lineage.weights(attention, args)
    if softmax is None:
        call_of, run = partial(AttentionCall.of, args, kwargs, lineage=lineage), attention
    else:
        call_of = partial(AttentionCall.of_softmax, softmax, *args, lineage=lineage)
        run = partial(product_with_values, attention, *args)
    call = call_of()
    if not edits or early:
        # Gradients are those of the canonical tensors, so the model has to go on with these.
        follows = call.is_rearranged and any(x.requires_grad for x in (call.query, call.key, call.value))
        done = replace(call, output=call.run(run)) if follows else call_of(output=attention(*args, **kwargs))
        for tap in early if edits else taps:
            tap.fire(tap.begin(), done)
        if not edits:
            return done
    return _edited(run, call, edits, late)


def _edited(
    attention: Callable[..., Tensor], call: AttentionCall, edits: list[Tap], captures: list[Tap]
) -> AttentionCall:
    """Edit the tensors of a call in the order of their computation, and pass them to the captures."""
    named = {name: [tap for tap in edits if tap.site.path == (name,)] for name in ATTENTION_TENSORS}
    for name, attribute in (("q", "query"), ("k", "key"), ("v", "value")):
        for tap in named[name]:
            call.check_known(name)
            call = replace(call, **{attribute: tap.replaced(tap.begin(), getattr(call, attribute))})
    dense = [(name, tap) for name in ("raw", "scores", "pattern") for tap in named[name]]
    if not dense or call.is_softmax:
        call = replace(call, output=call.run(attention))
    if dense and call.is_softmax:
        call.check()  # or what the model did to its weights after the softmax would be lost
    for name, tap in dense:
        call = call.edited(name, partial(tap.replaced, tap.begin()))
    of_z = [tap for tap in captures if tap.site.path == ("z",)]
    for tap in captures:
        if tap not in of_z:
            tap.fire(tap.begin(), call)
    for tap in named["z"]:
        call = replace(call, output=tap.replaced(tap.begin(), call.output))
    for tap in of_z:
        tap.fire(tap.begin(), call)
    return call
