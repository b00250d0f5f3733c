"""Ways to bring the outputs of chosen blocks of one model to disk: what `interp.py` measures side by side.

Every tool is a function (model, layers) -> extract(batches, folder); extract runs the model over the batches
and leaves what it captured below folder. `rows` reads the float32 rows of one layer back, whoever wrote them.
Peers are imported by their own tool only, so that no process holds a library that it does not measure.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

Extract = Callable[[Sequence[torch.Tensor], Path], None]
Tool = Callable[[torch.nn.Module, Sequence[int]], Extract]


@dataclass(frozen=True)
class Shape:
    """A GPT-2 and how much it reads: `batches` batches of `batch` rows of `context` tokens."""

    layers: int
    width: int
    heads: int
    vocab: int
    batch: int
    context: int
    batches: int

    def payload_bytes(self, layers: int) -> int:
        """Bytes of the float32 outputs of this many blocks."""
        return 4 * self.width * self.batch * self.context * self.batches * layers

    def resized(self, **changes: int) -> "Shape":
        """The same with other numbers."""
        return Shape(**(asdict(self) | changes))


def build(shape: Shape) -> torch.nn.Module:
    """A GPT-2 of Hugging Face with this shape, its weights a function of the shape only; float32, SDPA."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=shape.vocab,
        n_layer=shape.layers,
        n_embd=shape.width,
        n_head=shape.heads,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    with torch.device("meta"):
        model = GPT2LMHeadModel(config)
    model.to_empty(device="cpu")
    model.tie_weights()
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.fill_(0.5)
            else:
                parameter.uniform_(-0.05, 0.05, generator=random)
    return model.eval()


def block(layer: int) -> str:
    """The module name of a block."""
    return f"transformer.h.{layer}"


@contextmanager
def raw_files(folder: Path, layers: Sequence[int]) -> Iterator[dict[int, BinaryIO]]:
    """One unbuffered file a layer."""
    folder.mkdir(parents=True)
    with ExitStack() as stack:
        paths = {layer: folder / f"{layer}.bin" for layer in layers}
        yield {layer: stack.enter_context(path.open("wb", buffering=0)) for layer, path in paths.items()}


def put(file: BinaryIO, value: torch.Tensor) -> None:
    """Write the bytes of a tensor."""
    file.write(value.detach().contiguous().numpy().data)


def first(output: Any) -> torch.Tensor:
    """The hidden states of what a block returned."""
    return output[0] if isinstance(output, tuple) else output


def forward_only(model: torch.nn.Module, layers: Sequence[int]) -> Extract:
    """No hook, nothing written: what the forward passes alone cost."""

    def extract(batches: Sequence[torch.Tensor], folder: Path) -> None:
        for tokens in batches:
            model(tokens)

    return extract


def forward_and_write(part: str = "") -> Tool:
    """No hook, but as many bytes written as the payload has; of the whole model, or of this part of it."""

    def tool(model: torch.nn.Module, layers: Sequence[int]) -> Extract:
        runs = model.get_submodule(part)

        def extract(batches: Sequence[torch.Tensor], folder: Path) -> None:
            stand_in = torch.zeros(*batches[0].shape, model.config.n_embd)
            with raw_files(folder, layers) as files:
                for tokens in batches:
                    runs(tokens)
                    for file in files.values():
                        put(file, stand_in)

        return extract

    return tool


@contextmanager
def hooked(
    model: torch.nn.Module, layers: Sequence[int], use: Callable[[int, torch.Tensor], object]
) -> Iterator[None]:
    """Call use(layer, output) whenever a block has run."""

    def hook(layer: int) -> Callable[..., None]:
        def call(module: torch.nn.Module, inputs: object, output: Any) -> None:
            use(layer, first(output))

        return call

    handles = [model.get_submodule(block(i)).register_forward_hook(hook(i)) for i in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def hooks_streamed(model: torch.nn.Module, layers: Sequence[int]) -> Extract:
    """Plain hooks that write at once: the reference of the values."""

    def extract(batches: Sequence[torch.Tensor], folder: Path) -> None:
        with raw_files(folder, layers) as files, hooked(model, layers, lambda i, x: put(files[i], x)):
            for tokens in batches:
                model(tokens)

    return extract


def hooks_savez(model: torch.nn.Module, layers: Sequence[int]) -> Extract:
    """The loop that most people write: keep everything, concatenate, np.savez."""

    def extract(batches: Sequence[torch.Tensor], folder: Path) -> None:
        kept: dict[int, list[np.ndarray]] = {i: [] for i in layers}
        with hooked(model, layers, lambda i, x: kept[i].append(x.detach().clone().numpy())):
            for tokens in batches:
                model(tokens)
        folder.mkdir(parents=True)
        np.savez(folder / "acts.npz", **{str(i): np.concatenate(parts) for i, parts in kept.items()})

    return extract


def nnsight_cache(model: torch.nn.Module, layers: Sequence[int]) -> Extract:
    """`tracer.cache` of the blocks, written and dropped after each batch."""
    from nnsight import NNsight

    wrapped = NNsight(model)
    modules = [wrapped.transformer.h[i] for i in layers]

    def extract(batches: Sequence[torch.Tensor], folder: Path) -> None:
        with raw_files(folder, layers) as files:
            for tokens in batches:
                with wrapped.trace(tokens) as tracer:
                    cache = tracer.cache(modules=modules)
                for layer, file in files.items():
                    put(file, first(cache[f"model.{block(layer)}"].output))

    return extract


def nnsight_stop(model: torch.nn.Module, layers: Sequence[int]) -> Extract:
    """One block saved, then `tracer.stop()`."""
    from nnsight import NNsight

    wrapped, (layer,) = NNsight(model), layers

    def extract(batches: Sequence[torch.Tensor], folder: Path) -> None:
        with raw_files(folder, layers) as files:
            for tokens in batches:
                with wrapped.trace(tokens) as tracer:
                    output = wrapped.transformer.h[layer].output.save()
                    tracer.stop()
                put(files[layer], first(output))

    return extract


def transformer_lens_cache(model: torch.nn.Module, layers: Sequence[int]) -> Extract:
    """`run_with_cache` with a names filter, written and dropped after each batch; no weights are folded.

    A single layer stops the model after it.
    """
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    bridge = build_bridge_from_module(model, "GPT2LMHeadModel", hf_config=model.config)
    names = {i: f"blocks.{i}.hook_out" for i in layers}
    stop = {"stop_at_layer": layers[0] + 1} if len(layers) == 1 else {}

    def extract(batches: Sequence[torch.Tensor], folder: Path) -> None:
        with raw_files(folder, layers) as files:
            for tokens in batches:
                _, cache = bridge.run_with_cache(tokens, names_filter=list(names.values()), **stop)
                for layer, file in files.items():
                    put(file, cache[names[layer]])

    return extract


def forge_capture(model: torch.nn.Module, layers: Sequence[int]) -> Extract:
    """`capture` of the blocks, written and dropped after each batch; a single layer stops the model."""
    from forge_interp import capture

    def extract(batches: Sequence[torch.Tensor], folder: Path) -> None:
        sites = {i: f"{block(i)}:out" for i in layers}
        with (
            raw_files(folder, layers) as files,
            capture(model, list(sites.values()), stop=len(layers) == 1) as acts,
        ):
            for tokens in batches:
                model(tokens)
                for layer, file in files.items():
                    put(file, acts[sites[layer]])
                acts.clear()

    return extract


def forge_extract(export: str = "") -> Tool:
    """`extract_representations`; `export` into a file with this ending."""

    def tool(model: torch.nn.Module, layers: Sequence[int]) -> Extract:
        from forge_interp import ActivationStore, extract_representations

        def extract(batches: Sequence[torch.Tensor], folder: Path) -> None:
            folder.mkdir(parents=True)
            rows = torch.cat(list(batches))
            extract_representations(
                model,
                rows,
                [f"{block(i)}:out" for i in layers],
                out=folder / "acts",
                batch_size=len(batches[0]),
                progress=False,
            )
            if export:
                ActivationStore.open(folder / "acts").export(folder / f"exported{export}")

        return extract

    return tool


TOOLS: dict[str, Tool] = {
    "forward": forward_only,
    "forward + raw write": forward_and_write(),
    "blocks + raw write": forward_and_write("transformer"),
    "hooks, streamed": hooks_streamed,
    "hooks, kept, np.savez": hooks_savez,
    "nnsight cache": nnsight_cache,
    "nnsight stop": nnsight_stop,
    "transformer_lens run_with_cache": transformer_lens_cache,
    "forge capture": forge_capture,
    "forge extract": forge_extract(),
    "forge extract, export .npz": forge_extract(".npz"),
}


def rows(folder: Path, layer: int, width: int) -> np.ndarray:
    """[rows, width] float32 of one layer, as a tool left them; mapped, where the format allows it."""
    if (folder / f"{layer}.bin").exists():
        return np.memmap(folder / f"{layer}.bin", np.float32, "r").reshape(-1, width)
    if (folder / "acts.npz").is_file():
        with np.load(folder / "acts.npz") as arrays:
            if str(layer) in arrays:
                return arrays[str(layer)].reshape(-1, width)
    from forge_interp import ActivationStore

    (path,) = folder.glob("acts*")
    return ActivationStore.open(path)[f"{block(layer)}:out"].numpy().reshape(-1, width)
