"""How is an autoencoder trained, and how does an interrupted training go on with the same bits?

Letters: B rows of a batch over all ranks, R those of this rank, D and D' input and output dim, F features.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from forge_interp.errors import InterpError
from forge_interp.extraction.run.parts import dump, replacing
from forge_interp.progress import progress as with_progress
from forge_interp.sae.activations import Batch, Penalty
from forge_interp.sae.autoencoder import SAEConfig, SparseAutoencoder
from forge_interp.sae.formats import save_sae
from forge_interp.sae.rows import Rows, generator

STATE, METRICS = "state.safetensors", "metrics.jsonl"


@dataclass(frozen=True)
class SAETraining:
    """How to train; InterpError, listing all, where values cannot be. The loss is that of SAELens 6.

    Per row: the squared error, and what the activation adds (`penalty`); the mean over the batch. Adam with a
    learning rate that rises over `lr_warmup_steps` and falls towards 0 over the last `lr_decay_steps`.
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
    resample_every: int = 0  # steps after which dead features begin anew at rows with large errors; 0: never
    unit_decoder: bool = False  # keep decoder rows at norm 1
    scale_input: bool = False  # train on x sqrt(D) / mean |x|; the weights that come out take x
    save_every: int = 1000  # steps
    log_every: int = 100  # steps
    seed: int = 0

    def __post_init__(self) -> None:
        """Look at all values."""
        object.__setattr__(self, "betas", tuple(self.betas))
        least = {"steps": 1, "batch_rows": 1, "save_every": 1, "log_every": 1, "dead_after_steps": 1}
        least |= dict.fromkeys(
            ("lr_warmup_steps", "lr_decay_steps", "sparsity_warmup_steps", "resample_every"), 0
        )
        wrong = [
            f"{name} is {value!r}; expected a whole number of at least {low}"
            for name, low in least.items()
            if not isinstance(value := getattr(self, name), int) or isinstance(value, bool) or value < low
        ]
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
    """Train an autoencoder or a transcoder on rows of a store or of a model; go on where a run stopped.

    With torch.distributed every rank calls it: each takes its rows of every batch, gradients are added, and
    the result is that of one process but for rounding. Collective.

    Args:
        config: what to train; `normalize_activations` "none" (see `scale_input`).
        rows: `StoreRows` or `ModelRows`, of which one window is in memory at a time. Rows of a window that
            make no whole batch are left out.
        training: how.
        out: a folder for the state, `metrics.jsonl` and in the end the autoencoder (format of SAELens, see
            `load_sae`). The same call goes on from there, with the same bits on the same machine. None:
            nothing is written.
        device: where to train.
        progress: draw a bar on a terminal.

    InterpError: `out` belongs to another training, with the differences; a window has no whole batch.
    """
    if config.normalize_activations != "none" or config.reshape_activations != "none":
        raise InterpError(
            f"training with normalize_activations={config.normalize_activations!r}, reshape_activations="
            f"{config.reshape_activations!r}; expected 'none': give scale_input=True, and rows [rows, D]"
        )
    if training.scale_input and config.d_out is not None:
        raise InterpError("scale_input of a transcoder, which has two scales; expected False")
    run = _Run(config, rows, training, device)
    folder = None if out is None else Path(out)
    if folder is not None:
        run.resume(folder)
    steps = range(run.step, training.steps)
    for step in with_progress(steps, len(steps), "sae", progress and run.rank == 0):
        metrics = run.one_step()
        is_last = step + 1 == training.steps
        if folder is not None and run.rank == 0:
            if metrics:
                with (folder / METRICS).open("a") as file:
                    file.write(dump(metrics) + "\n")
            if is_last or (step + 1) % training.save_every == 0:
                run.save(folder)
    if run.scale != 1.0:
        run.sae.fold_scale(run.scale)
    if folder is not None and run.rank == 0:
        save_sae(run.sae, folder)
    if run.size > 1:
        dist.barrier()
    return run.sae


class _Run:
    """A training under way: all that changes is here."""

    def __init__(self, config: SAEConfig, rows: Rows, training: SAETraining, device: Any) -> None:
        running = dist.is_available() and dist.is_initialized()
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if running else (0, 1)
        if training.batch_rows % self.size:
            raise InterpError(
                f"batch_rows is {training.batch_rows}; expected a multiple of {self.size} ranks"
            )
        self.rows, self.training, self.device = rows, training, device
        self.sae = SparseAutoencoder(config, seed=training.seed, device=device)
        if training.unit_decoder:
            _normalize(self.sae)
        self.optimizer = torch.optim.Adam(self.sae.parameters(), lr=training.lr, betas=training.betas)
        self.idle = torch.zeros(config.d_sae, dtype=torch.int64, device=device)  # steps since each was active
        self.step, self.window, self.offset, self.scale = 0, 0, 0, 0.0
        self._held: tuple[Tensor, Tensor] | None = None

    def one_step(self) -> dict[str, float]:
        """Train on the next batch; what happened, if this step is to be logged."""
        training, sae = self.training, self.sae
        x, y = self._next_batch()
        mine = slice(self.rank, None, self.size)
        for group in self.optimizer.param_groups:
            group["lr"] = training.lr * _lr_factor(training, self.step)
        warm = min(1.0, (self.step + 1) / max(1, training.sparsity_warmup_steps))
        penalty = Penalty(**(asdict(training.penalty) | {"coefficient": training.penalty.coefficient * warm}))
        batch = forward(sae, x[mine], y[mine], self.idle > training.dead_after_steps, penalty, self.gather)
        errors = (batch.output - batch.target).square().sum(-1)
        loss = (errors + sae.activation.losses(sae, batch, penalty)).sum() / len(x)
        self.optimizer.zero_grad()
        loss.backward()
        self._update()
        fired = (batch.acts.detach() > 0).any(0).to(torch.int64)
        self.idle = (self.idle + 1) * (1 - self._reduce(fired, dist.ReduceOp.MAX))
        self.step += 1
        if training.resample_every and self.step % training.resample_every == 0:
            self._resample(x, y, self.gather(errors.detach()))
        if self.step % training.log_every and self.step != training.steps:
            return {}
        sums = [loss.detach(), errors.detach().sum(), (batch.acts.detach() > 0).sum()]
        total, error, active = self._reduce(torch.stack([s.double() for s in sums])).tolist()
        spread = (y - y.mean(0)).square().sum().item()
        return {
            "step": self.step,
            "loss": total,
            "mse": error / len(x),
            "l0": active / len(x),
            "explained_variance": 1 - error / spread if spread else float("nan"),
            "dead": int((self.idle > training.dead_after_steps).sum()),
            "lr": self.optimizer.param_groups[0]["lr"],
        }

    def gather(self, values: Tensor) -> Tensor:
        """[n] of each rank, the same number on all -> [ranks n]; rank r's i-th is at r n + i."""
        if self.size == 1:
            return values
        found = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(found, values.contiguous())
        return torch.cat(found)

    def save(self, folder: Path) -> None:
        """Write the state, in place of the one before."""
        moments = self.optimizer.state
        tensors = {f"sae.{name}": value for name, value in self.sae.state_dict().items()}
        for name, parameter in self.sae.named_parameters():
            tensors |= {f"{key}.{name}": value for key, value in moments[parameter].items()}
        tensors = {k: v.detach().cpu().contiguous() for k, v in (tensors | {"idle": self.idle}).items()}
        data = {"step": self.step, "window": self.window, "offset": self.offset, "scale": self.scale}
        with replacing(folder / STATE) as file:
            file.write(save(tensors, {"forge_interp": dump(data | {"request": self._request()})}))

    def resume(self, folder: Path) -> None:
        """Go on from the state in a folder, if there is one; InterpError if it is of another training."""
        path = folder / STATE
        if self.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
        if not path.is_file():
            _keep_lines(folder / METRICS, 0, self.rank)
            return
        with safe_open(path, "pt") as file:
            data = json.loads(file.metadata()["forge_interp"])
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        request = json.loads(dump(self._request()))
        found = {key: (x, request.get(key)) for key, x in data["request"].items() if x != request.get(key)}
        if found:
            texts = "; ".join(
                f"{key}: {there!r:.120} there, {here!r:.120} asked" for key, (there, here) in found.items()
            )
            raise InterpError(
                f"{folder} was made by another training ({texts}); expected the same: another out"
            )
        self.sae.load_state_dict(
            {k.removeprefix("sae."): v for k, v in state.items() if k.startswith("sae.")}
        )
        for name, parameter in self.sae.named_parameters():
            names = ("step", "exp_avg", "exp_avg_sq")
            self.optimizer.state[parameter] = {key: state[f"{key}.{name}"] for key in names}
            for key in names[1:]:
                self.optimizer.state[parameter][key] = state[f"{key}.{name}"].to(self.device or "cpu")
        self.idle = state["idle"].to(self.device or "cpu")
        self.step, self.window, self.offset = data["step"], data["window"], data["offset"]
        self.scale = data["scale"]
        _keep_lines(folder / METRICS, self.step, self.rank)

    def _request(self) -> dict[str, Any]:
        return {
            "sae": self.sae.config.to_dict(),
            "training": asdict(self.training),
            "rows": self.rows.identity(),
        }

    def _next_batch(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets [B, ...] of all ranks."""
        size = self.training.batch_rows
        x, y = self._held or self._read_window()
        if self.offset + size > len(x) and self.offset:
            self.window, self.offset = self.window + 1, 0
            x, y = self._read_window()
        if self.offset + size > len(x):
            raise InterpError(
                f"a window has {len(x)} rows; expected at least one batch of batch_rows={size}: give a "
                "larger window, more data, or a smaller batch"
            )
        cut = slice(self.offset, self.offset + size)
        self.offset += size
        return x[cut].to(self.device or "cpu"), y[cut].to(self.device or "cpu")

    def _read_window(self) -> tuple[Tensor, Tensor]:
        """All rows of the present window, shuffled and scaled."""
        self._held = None
        x, y = self.rows.share(self.window, self.rank, self.size)
        is_pair = y is not x
        x = self._joined(x)
        y = self._joined(y) if is_pair else x
        if x.shape[1:] != (self.sae.config.d_in,) or y.shape[1:] != self.sae.b_dec.shape:
            raise InterpError(
                f"rows have {list(x.shape[1:])} and {list(y.shape[1:])} numbers; expected d_in="
                f"{self.sae.config.d_in} and {len(self.sae.b_dec)}: is this the site?"
            )
        if self.scale == 0.0:
            size = (x.norm(dim=-1).mean() / x.shape[1] ** 0.5).item()
            self.scale = 1 / size if self.training.scale_input and size else 1.0
        order = torch.randperm(len(x), generator=generator(self.training.seed, self.window, 1))
        x = x[order] * self.scale
        self._held = x, (y[order] * self.scale if is_pair else x)
        return self._held

    def _joined(self, share: Tensor) -> Tensor:
        """The shares of all ranks, in order, float32."""
        share = share.float()
        if self.size == 1:
            return share
        shapes: list[Any] = [None] * self.size
        dist.all_gather_object(shapes, tuple(share.shape))
        most, width = max(n for n, *_ in shapes), max(shape[1] for shape in shapes)
        padded = share.new_zeros(most, width)
        padded[: len(share), : share.shape[1]] = share
        padded = padded.to(self.device or "cpu")
        found = self.gather(padded.flatten()).view(self.size, most, width).cpu()
        return torch.cat([part[: shape[0]] for part, shape in zip(found, shapes, strict=True)])

    def _reduce(self, value: Tensor, how: Any = None) -> Tensor:
        if self.size > 1:
            dist.all_reduce(value, how or dist.ReduceOp.SUM)
        return value

    @torch.no_grad()
    def _update(self) -> None:
        """One step of Adam with the gradients of all ranks."""
        sae, training = self.sae, self.training
        for parameter in sae.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            self._reduce(parameter.grad)
        if training.unit_decoder and sae.W_dec.grad is not None:
            along = (sae.W_dec.grad * sae.W_dec).sum(-1, keepdim=True)
            sae.W_dec.grad -= along * sae.W_dec
        self.optimizer.step()
        if training.unit_decoder:
            _normalize(sae)
        if sae.config.activation == "jumprelu":
            sae.threshold.clamp_(min=0.0)

    @torch.no_grad()
    def _resample(self, x: Tensor, y: Tensor, errors: Tensor) -> None:
        """Let dead features begin anew at rows drawn by their squared loss (Bricken et al. 2023, appendix)."""
        dead = self.idle > self.training.dead_after_steps
        count, sae = int(dead.sum()), self.sae
        chance = errors.view(self.size, -1).T.flatten().double().square().cpu()  # in the order of x
        if not count or not chance.sum() > 0:
            return
        chosen = torch.multinomial(chance, count, True, generator=generator(self.training.seed, self.step, 2))
        shift = sae.b_dec if sae.config.apply_b_dec_to_input else 0.0
        given = torch.nn.functional.normalize(x[chosen] - shift, dim=-1)
        alive = ~dead if bool((~dead).any()) else dead
        sae.W_enc[:, dead] = 0.2 * sae.W_enc[:, alive].norm(dim=0).mean() * given.T
        wanted = torch.nn.functional.normalize(y[chosen] - sae.b_dec, dim=-1)
        sae.W_dec[dead] = sae.W_dec[alive].norm(dim=-1).mean() * wanted
        for name, start in sae.activation.initial.items():
            getattr(sae, name)[dead] = start
        for name in ("W_enc", "W_dec", *sae.activation.initial):
            moments, index = (
                self.optimizer.state[getattr(sae, name)],
                (slice(None), dead) if name == "W_enc" else dead,
            )
            for key in ("exp_avg", "exp_avg_sq"):
                moments[key][index] = 0.0
        self.idle[dead] = 0


def forward(
    sae: SparseAutoencoder,
    x: Tensor,
    y: Tensor,
    dead: Tensor,
    penalty: Penalty,
    gather: Callable[[Tensor], Tensor],
) -> Batch:
    """What a training step computes for inputs [R, D] and targets [R, D'], with gradients."""
    pre = sae.pre(x)
    acts = sae.activation.train(sae, pre, penalty, gather)
    return Batch(x, y, pre, acts, sae.decode(acts, x), dead)


def _lr_factor(training: SAETraining, step: int) -> float:
    rise = (step + 1) / training.lr_warmup_steps if training.lr_warmup_steps else 1.0
    fall = (training.steps - step) / (training.lr_decay_steps + 1)
    return min(1.0, rise, fall)


@torch.no_grad()
def _normalize(sae: SparseAutoencoder) -> None:
    sae.W_dec /= sae.W_dec.norm(dim=-1, keepdim=True).clamp_min(1e-8)


def _keep_lines(path: Path, step: int, rank: int) -> None:
    """Forget what was logged behind a step: it will be logged again."""
    if rank or not path.is_file():
        return
    lines = path.read_text().splitlines()
    kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= step]
    with replacing(path) as file:
        file.write("".join(f"{line}\n" for line in kept).encode())
