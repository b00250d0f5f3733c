"""How is an autoencoder trained, and how does an interrupted training continue with the same bits?

Letters: B rows of a batch over all ranks, R rows of this rank, D and D' input and output dim, F features.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from forge_interp.errors import InterpError
from forge_interp.extraction.folder import differences
from forge_interp.extraction.run.parts import dump, replacing
from forge_interp.progress import progress as with_progress
from forge_interp.sae.activations import Batch, Penalty, Reduce
from forge_interp.sae.autoencoder import SAEConfig, SparseAutoencoder
from forge_interp.sae.formats import architecture_of, save_sae
from forge_interp.sae.rows import Rows, generator

STATE, METRICS = "state.safetensors", "metrics.jsonl"
_PLACE = ("step", "window", "offset", "scale")


@dataclass(frozen=True)
class SAETraining:
    """How to train; InterpError lists all impossible values. The loss is that of SAELens 6.

    A row's loss is the squared error plus the activation's terms (`penalty`); a batch has the mean. Adam's
    learning rate rises over `lr_warmup_steps` and falls towards 0 over the last `lr_decay_steps`.
    """

    steps: int
    batch_rows: int = 4096  # B, over all ranks
    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.999)
    lr_warmup_steps: int = 0
    lr_decay_steps: int = 0
    penalty: Penalty = field(default_factory=Penalty)
    sparsity_warmup_steps: int = 0  # over which the coefficient of the penalty rises from 0
    dead_after_steps: int = 1000  # a feature that was not active in as many steps is dead
    unit_decoder: bool = False  # keep decoder rows at norm 1
    scale_input: bool = False  # train on x sqrt(D) / mean |x|; the weights that come out take x
    save_every: int = 1000  # steps
    log_every: int = 100  # steps
    seed: int = 0

    def __post_init__(self) -> None:
        """Check all values."""
        least: dict[str, int] = dict.fromkeys(
            ("steps", "batch_rows", "save_every", "log_every", "dead_after_steps"), 1
        )
        least |= dict.fromkeys(("lr_warmup_steps", "lr_decay_steps", "sparsity_warmup_steps"), 0)
        values = {name: getattr(self, name) for name in least}
        wrong = [f"{k} is {v!r}; expected {least[k]} or more" for k, v in values.items() if not v >= least[k]]
        wrong += [] if self.lr > 0 else [f"lr is {self.lr!r}; expected more than 0"]
        if wrong:
            raise InterpError("; ".join(wrong))


def train_sae(
    config: SAEConfig,
    rows: Rows,
    training: SAETraining,
    out: str | Path | None = None,
    *,
    device: Any = None,
    progress: bool = True,
) -> SparseAutoencoder:
    """Train an autoencoder or a transcoder on rows of a store or of a model, or continue a stopped run.

    With torch.distributed every rank calls it: each takes its rows of every batch, gradients are added, and
    the result equals that of one process but for rounding. Collective.

    `config` has `normalize_activations` "none" (see `scale_input`). One window of `rows` (`StoreRows`,
    `ModelRows`) is in memory at a time; rows of a window beyond its last whole batch are left out. `out` is a
    folder for the state, `metrics.jsonl` and at the end the autoencoder (format of SAELens, see `load_sae`):
    the same call continues from there, with the same bits on the same machine. None: nothing is written.

    InterpError: `out` belongs to another training, with the differences; no window has a whole batch; rows or
    weights are not finite; SAELens has no format for the autoencoder.
    """
    how = (config.normalize_activations, config.reshape_activations)
    if how != ("none", "none") or (training.scale_input and config.d_out is not None):
        raise InterpError(
            f"normalize_activations, reshape_activations are {how}, scale_input is {training.scale_input}; "
            "expected 'none' for both: give scale_input=True (not of a transcoder), and rows [rows, D]"
        )
    if out is not None:
        architecture_of(config)  # before the work is done
    run = _Run(config, rows, training, torch.device(device or "cpu"))
    folder = None if out is None else Path(out)
    written = folder if run.rank == 0 else None  # by one rank
    with nullcontext() if written is None else _locked(written):
        if folder is not None:
            run.resume(folder)
        steps = range(run.step, training.steps)
        for step in with_progress(steps, len(steps), "sae", progress and run.rank == 0):
            metrics = run.one_step()
            if written is not None and metrics:
                with (written / METRICS).open("a") as file:
                    file.write(dump(metrics) + "\n")
            if written is not None and (not (step + 1) % training.save_every or step + 1 == training.steps):
                run.save(written)
        run.sae.fold_scale(run.scale or 1.0)
        if written is not None:
            save_sae(run.sae, written)
    if run.size > 1:
        dist.barrier()
    return run.sae


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder in the `with`; InterpError where another training writes to it."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                text = f"another training writes to {folder}; expected one: wait, or give another out"
                raise InterpError(text) from None
        yield
    finally:
        os.close(handle)


class _Run:
    """A training with all its changing state."""

    def __init__(self, config: SAEConfig, rows: Rows, training: SAETraining, device: torch.device) -> None:
        running = dist.is_available() and dist.is_initialized()
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if running else (0, 1)
        if training.batch_rows % self.size:
            raise InterpError(f"batch_rows={training.batch_rows}; expected a multiple of {self.size} ranks")
        self.rows, self.training, self.device = rows, training, device
        self.sae = SparseAutoencoder(config, seed=training.seed, device=device)
        if training.unit_decoder:
            _normalize(self.sae)
        self.adam = torch.optim.Adam(self.sae.parameters(), lr=training.lr, betas=training.betas)
        for p in self.sae.parameters():  # which Adam would make in its first step, after `resume`
            moments = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            self.adam.state[p] = {"step": torch.zeros(()), **moments}
        self.idle = torch.zeros(config.d_sae, dtype=torch.int64, device=device)  # steps since each was active
        self.step, self.window, self.offset, self.scale = 0, 0, 0, 0.0
        request = {"sae": asdict(config), "training": asdict(training), "rows": rows.identity()}
        self.request = json.loads(dump(request))
        self._held: tuple[Tensor, Tensor] | None = None

    def one_step(self) -> dict[str, float]:
        """Train on the next batch; return metrics if this step is to be logged."""
        training, sae = self.training, self.sae
        x, y = self._next_batch()
        mine = slice(self.rank, None, self.size)
        rise = (self.step + 1) / training.lr_warmup_steps if training.lr_warmup_steps else 1.0
        lr = training.lr * min(1.0, rise, (training.steps - self.step) / (training.lr_decay_steps + 1))
        warm = min(1.0, (self.step + 1) / max(1, training.sparsity_warmup_steps))
        penalty = replace(training.penalty, coefficient=training.penalty.coefficient * warm)
        dead = self.idle > training.dead_after_steps
        batch = forward(sae, (x[mine], y[mine]), dead, penalty, self.gather)
        errors = (batch.output - batch.target).square().sum(-1)
        loss = (errors + sae.activation.losses(sae, batch, penalty)).sum() / len(x)
        self._update(loss, lr)
        is_active = batch.acts.detach() > 0
        self.idle.add_(1).mul_(1 - self._reduce(is_active.any(0).long(), dist.ReduceOp.MAX))
        self.step += 1
        if self.step % training.log_every and self.step != training.steps:
            return {}
        sums = torch.stack([each.detach().double() for each in (loss, errors.sum(), is_active.sum())])
        total, error, active = self._reduce(sums).tolist()
        if not math.isfinite(total):
            text = f"the loss of step {self.step} is {total}; expected a number: rows that are, a lower lr"
            raise InterpError(text)
        spread = (y - y.mean(0)).square().sum().item()
        found = {"step": self.step, "loss": total, "mse": error / len(x), "l0": active / len(x)}
        found |= {"explained_variance": 1 - error / spread if spread else float("nan")}
        return found | {"dead": int((self.idle > training.dead_after_steps).sum()), "lr": lr}

    def gather(self, values: Tensor) -> Tensor:
        """Gather [n] of each rank, with equal n, into [ranks n]; item i of rank r is at r n + i."""
        if self.size == 1:
            return values
        found = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(found, values.contiguous())
        return torch.cat(found)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All changing tensors of the state."""
        found = {f"sae.{name}": value for name, value in self.sae.state_dict().items()} | {"idle": self.idle}
        for name, p in self.sae.named_parameters():
            found |= {f"adam.{name}.{key}": value for key, value in self.adam.state[p].items()}
        return found

    def save(self, folder: Path) -> None:
        """Replace the saved state; InterpError if weights are not finite."""
        if not all(bool(p.isfinite().all()) for p in self.sae.parameters()):
            raise InterpError(
                f"weights of step {self.step} are not finite; expected numbers: a lower lr. {folder} keeps "
                "the state saved before"
            )
        data = {name: getattr(self, name) for name in _PLACE} | {"request": self.request}
        with replacing(folder / STATE) as file:
            held = {name: value.detach().cpu().contiguous() for name, value in self.tensors.items()}
            file.write(save(held, {"forge_interp": dump(data)}))

    @torch.no_grad()
    def resume(self, folder: Path) -> None:
        """Load the state in a folder, if there is one; InterpError if it belongs to another training."""
        if (folder / STATE).is_file():
            with safe_open(folder / STATE, "pt") as file:
                data = json.loads(file.metadata()["forge_interp"])
                if found := differences(data["request"], self.request):
                    text = f"{folder} was made by another training ({'; '.join(found)})"
                    raise InterpError(f"{text}; expected the same: give another out")
                for name, value in self.tensors.items():
                    value.copy_(file.get_tensor(name))
            for name in _PLACE:
                setattr(self, name, data[name])
        if self.rank == 0 and (folder / METRICS).is_file():  # what comes after this step is logged again
            lines = (folder / METRICS).read_text().splitlines()
            kept = [x for x in lines if x.endswith("}") and json.loads(x)["step"] <= self.step]
            with replacing(folder / METRICS) as file:
                file.write("".join(f"{line}\n" for line in kept).encode())

    def _next_batch(self) -> tuple[Tensor, Tensor]:
        """Return inputs and targets [B, ...] of all ranks."""
        size, most = self.training.batch_rows, 0
        for _ in range(self.rows.windows + 1):
            x, y = self._held or self._read_window()
            if self.offset + size <= len(x):
                cut = slice(self.offset, self.offset + size)
                self.offset += size
                return x[cut].to(self.device), y[cut].to(self.device)
            most, self.window, self.offset, self._held = max(most, len(x)), self.window + 1, 0, None
        raise InterpError(
            f"a window has {most} rows; expected at least one batch of batch_rows={size}: give a "
            "larger window, more data, or a smaller batch"
        )

    def _read_window(self) -> tuple[Tensor, Tensor]:
        """Return all rows of the current window, shuffled and scaled."""
        own, other = self.rows.share(self.window, self.rank, self.size)
        x = self._joined(own)
        y = x if other is own else self._joined(other)
        if x.shape[1:] != (self.sae.config.d_in,) or y.shape[1:] != self.sae.b_dec.shape:
            raise InterpError(
                f"rows have {list(x.shape[1:])} and {list(y.shape[1:])} numbers; expected d_in="
                f"{self.sae.config.d_in} and {len(self.sae.b_dec)}: is this the site?"
            )
        if bad := int((~(x.isfinite().all(1) & y.isfinite().all(1))).sum()):
            raise InterpError(
                f"{bad} of {len(x)} rows of window {self.window} are not finite; expected numbers: leave out "
                "the samples that overflow, or compute in a wider dtype"
            )
        if self.scale == 0.0:
            size = (x.norm(dim=-1).mean() / x.shape[1] ** 0.5).item()
            self.scale = 1 / size if self.training.scale_input and size else 1.0
        order = torch.randperm(len(x), generator=generator(self.training.seed, self.window, 1))
        made = x[order] * self.scale
        self._held = made, (made if y is x else y[order] * self.scale)
        return self._held

    def _joined(self, share: Tensor) -> Tensor:
        """Join the shares of all ranks, in order, as float32."""
        share, shapes = share.float(), list[Any]([None] * self.size)
        if self.size == 1:
            return share
        dist.all_gather_object(shapes, tuple(share.shape))
        padded = torch.zeros(*map(max, zip(*shapes, strict=True)), device=self.device)
        padded[: len(share), : share.shape[1]] = share
        found = self.gather(padded.flatten()).view(self.size, *padded.shape).cpu()
        return torch.cat([part[: shape[0]] for part, shape in zip(found, shapes, strict=True)])

    def _reduce(self, value: Tensor, how: Any = None) -> Tensor:
        if self.size > 1:
            dist.all_reduce(value, how or dist.ReduceOp.SUM)
        return value

    def _update(self, loss: Tensor, lr: float) -> None:
        """Make one step of Adam with the gradients of all ranks."""
        sae, parameters = self.sae, dict(self.sae.named_parameters())
        gradients = torch.autograd.grad(
            loss, list(parameters.values()), allow_unused=True, materialize_grads=True
        )
        for p, gradient in zip(parameters.values(), gradients, strict=True):
            p.grad = self._reduce(gradient)
        rows, along = sae.W_dec.data, sae.W_dec.grad
        if self.training.unit_decoder and along is not None:  # without what would change the norms
            sae.W_dec.grad = along - (along * rows).sum(-1, keepdim=True) * rows
        self.adam.param_groups[0]["lr"] = lr
        self.adam.step()
        if self.training.unit_decoder:
            _normalize(sae)
        if "threshold" in parameters:
            sae.threshold.data.clamp_(min=0.0)


def forward(
    sae: SparseAutoencoder, pair: tuple[Tensor, Tensor], dead: Tensor, penalty: Penalty, gather: Reduce
) -> Batch:
    """Compute features and outputs of a training step for inputs [R, D] and targets [R, D']."""
    (x, y), pre = pair, sae.pre(pair[0])
    acts = sae.activation.train(sae, pre, penalty, gather)
    return Batch(x, y, pre, acts, sae.decode(acts, x), dead)


@torch.no_grad()
def _normalize(sae: SparseAutoencoder) -> None:
    sae.W_dec.div_(sae.W_dec.norm(dim=-1, keepdim=True).clamp_min(1e-8))
