"""Which final norm and head turn a hidden state [..., D] of this model into logits [..., V]?"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from forge_interp.attention.placement import is_dtensor
from forge_interp.errors import InterpError
from forge_interp.hooks.sites import named_modules

Readout = str | Callable[[Tensor], Tensor]
"""The name of a submodule, or a function of a tensor."""

HEAD_NAMES = ("lm_head", "head", "embed_out", "unembed", "output_head", "output_projection")
NORM_NAMES = (
    *("norm", "final_norm", "norm_f", "norm_out", "ln_f", "ln_final", "ln_out"),
    *("final_layer_norm", "final_layernorm", "layer_norm"),
)
_NAMES = {"head": HEAD_NAMES, "norm": NORM_NAMES}


class Unembedding:
    """The model's own final norm followed by its own head: [..., D] -> [..., V].

    The head is `model.get_output_embeddings()` (Hugging Face), else the one module nearest to the root whose
    name is in `HEAD_NAMES`; the norm is the one module outside of the numbered blocks whose name is in
    `NORM_NAMES`. Names do not reveal further steps (soft caps, scales, a projection between the two): give
    these as a function, for a cap of 30 `head=lambda x: 30 * torch.tanh(model.lm_head(x) / 30)` (Gemma-2).
    `norm_name` and `head_name` are None for a function that is no module of the model.
    """

    def __init__(self, model: nn.Module, norm: Readout | None = None, head: Readout | None = None) -> None:
        """Find norm and head, or take them by name or as a function.

        `norm=torch.nn.Identity()` is for a model without a norm. InterpError where no module or several (all
        are listed) are found, a name is unknown, or a weight is sharded over a device mesh.
        """
        names = {id(module): name for name, module in named_modules(model).items()}
        self.head = _find(model, "head", head)
        self.norm = _find(model, "norm", norm)
        self.norm_name, self.head_name = names.get(id(self.norm)), names.get(id(self.head))
        _refuse_sharded(self.norm, f"norm {self.norm_name or ''}")
        _refuse_sharded(self.head, f"head {self.head_name or ''}")

    def __call__(self, hidden: Tensor) -> Tensor:
        """Turn [..., D] into logits [..., V]."""
        return self.head(self.norm(hidden))


def _find(model: nn.Module, kind: str, given: Readout | None) -> Callable[[Tensor], Tensor]:
    """Return `given`, or the one module with a usual name; among heads the nearest to the root."""
    if given is not None and not isinstance(given, str):
        return given
    modules = named_modules(model)
    outside = [name for name in modules if not any(map(str.isdigit, name.split(".")))]
    usual = [name for name in outside if name.rpartition(".")[2] in _NAMES[kind]]
    if kind == "head":
        nearest = min((name.count(".") for name in usual), default=0)
        usual = [name for name in usual if name.count(".") == nearest]
        ask: Any = getattr(model, "get_output_embeddings", None)
        if given is None and callable(ask) and isinstance(found := ask(), nn.Module):
            return found
    given = usual[0] if given is None and len(usual) == 1 else given
    if given in modules:
        return modules[given]
    if given is not None:
        what = f"{kind} is {given!r}, which is no submodule"
    elif usual:
        what = f"the {kind} of {type(model).__name__} is ambiguous: {', '.join(usual)}"
    else:
        what = f"{type(model).__name__} has no module called {', '.join(_NAMES[kind])} outside of its blocks"
    near = usual or [name for name in outside if kind in type(modules[name]).__name__.lower()][:8]
    hint = "; torch.nn.Identity() if there is none" if kind == "norm" else ""
    hint += f"; near: {', '.join(near)}" if near else ""
    raise InterpError(f'{what}; expected one: pass {kind}="name" or a function{hint}')


def _refuse_sharded(function: Any, name: str) -> None:
    for parameter, value in function.named_parameters() if isinstance(function, nn.Module) else ():
        if is_dtensor(value):
            raise InterpError(
                f"{parameter!r} of the {name} is sharded over a device mesh; expected whole "
                "weights, for outside of the model's forward pass nothing gathers them: load the exported "
                "weights into one process, or pass functions that gather"
            )
