"""What a real training step of a job takes on CPU ranks: memory, collectives and FLOPs."""

from __future__ import annotations

import weakref
from collections import Counter
from contextlib import ExitStack
from typing import Any

import torch
from forge_data.loading.micro_batch import MicroBatch
from forge_model import initialize
from forge_parallel import Env, build_mesh, local_shard
from forge_trainer.build import build_optimizer, build_parts
from forge_trainer.config.job import load_job
from forge_trainer.plan.batches import batch_on_paper
from forge_trainer.plan.stage import micro_batches_of
from forge_trainer.steps.update import Update
from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

WORDS = {
    "gather": "all-gather",
    "reducescatter": "reduce-scatter",
    "allreduce": "all-reduce",
    "alltoall": "all-to-all",
}


class LiveBytes(TorchDispatchMode):
    """The bytes of all storages that live, and the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.live = self.peak = 0

    def note(self, tensor: Tensor) -> None:
        if hasattr(type(tensor), "__tensor_flatten__"):
            for name in tensor.__tensor_flatten__()[0]:
                if isinstance(part := getattr(tensor, name), Tensor):
                    self.note(part)
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.sizes:
            self.sizes[key] = 0
            weakref.finalize(storage, self.forget, key)
        self.resized(storage)

    def resized(self, storage: Any) -> None:
        if (key := storage._cdata) in self.sizes:
            self.live += storage.nbytes() - self.sizes[key]
            self.sizes[key] = storage.nbytes()
            self.peak = max(self.peak, self.live)

    def forget(self, key: int) -> None:
        self.live -= self.sizes.pop(key)

    def __enter__(self) -> Any:
        resize = torch.UntypedStorage.resize_

        def resize_(storage: Any, size: int) -> Any:
            resize(storage, size)
            self.resized(storage)

        torch.UntypedStorage.resize_ = resize_
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        del torch.UntypedStorage.resize_
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(one, "__tensor_flatten__") for one in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        for one in tree_leaves(out):
            if isinstance(one, Tensor):
                self.note(one)
        return out


class Bytes(CommDebugMode):
    """Counts the bytes of what CommDebugMode counts, too."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.get_total_counts()
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if self.get_total_counts() > before:
            sizes = [x.numel() * x.element_size() for x in tree_leaves((args, out)) if isinstance(x, Tensor)]
            kind = kind_of(func)
            if kind in ("all-gather", "reduce-scatter"):
                self.bytes[kind] += max(sizes)
            elif kind == "all-to-all":  # c10d's takes (output, input), the functional one (input)
                self.bytes[kind] += sizes["alltoall_base" in str(func)]
            else:
                self.bytes[kind] += sizes[0]
        return out


def kind_of(op: Any) -> str:
    name = str(op).rpartition("::")[2].replace("_", "").replace("c10d.", "")
    return next(kind for word, kind in WORDS.items() if word in name)


def measured(path: str, overrides: list[str]) -> dict[str, Any]:
    """Peak bytes, collectives (count, bytes) by kind and FLOPs of a step of this rank."""
    job, env = load_job(path, overrides).value, Env.detect()
    with ExitStack() as stack:
        mesh = build_mesh(job.mesh, env)
        parts = build_parts(job, mesh)
        for part in parts:
            initialize(part, 0, local_shard)
        optimizer = build_optimizer(job, parts, mesh)
        update = Update(
            parts, optimizer, lambda step: 1.0, job.train.clip_norm, mesh, job.optimizer.ema_decay
        )
        step = job.step.build(parts, job.loss.build(), mesh, update=update)
        batch = batch_of(job, micro_batches_of(job, env.world_size))
        step.train(batch, 0)
        live = stack.enter_context(LiveBytes())
        state = [x for one in optimizer.state.values() for x in one.values() if isinstance(x, Tensor)]
        held = [t for part in parts for t in (*part.parameters(), *part.buffers())]
        for tensor in (*held, *state, *(x for micro in batch for x in micro.inputs.values())):
            live.note(tensor.detach() if tensor.requires_grad else tensor)
        step.train(batch, 1)
        stack.pop_all().close()
        with Bytes() as said:
            step.train(batch, 2)
        counts: Counter[str] = Counter()
        for op, count in said.get_comm_counts().items():
            counts[kind_of(op)] += count
        with FlopCounterMode(display=False) as flops:
            step.train(batch, 3)
    return {
        "peak": live.peak,
        "said": {kind: (count, said.bytes[kind]) for kind, count in counts.items()},
        "flops": flops.get_total_flops(),
    }


def batch_of(job: Any, count: int) -> list[MicroBatch]:
    """Random tokens, such as the loader gives; of a model of images, black ones in half of each sequence."""
    if job.model.items() is not None:
        return batch_on_paper(job, count)  # outside of fake tensors it has values
    shape, found = (job.train.micro_batch, job.data.max_tokens), []
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        rows = torch.randint(job.model.vocab_size, (shape[0], shape[1] + 1), generator=generator)
        inputs = {"tokens": rows[:, :-1], "labels": rows[:, 1:]}
        if job.data.mask_documents:
            places = torch.arange(shape[1]).expand(shape)
            inputs |= {"doc_ids": places // 9, "positions": places % 9}
        targets = torch.tensor(shape[0] * shape[1])
        statistics = {"source": torch.zeros(shape[0], dtype=torch.int64), "targets": targets}
        found.append(MicroBatch(inputs, statistics, tuple(job.data.source_names())))
    return found
