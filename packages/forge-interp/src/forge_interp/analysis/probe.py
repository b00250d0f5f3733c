"""Can a linear readout find a property in a layer, and is it the layer or the readout that knows it?

Letters: n samples, d features, T targets (regression) or labels, K classes, F folds.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from forge_interp.analysis.arrays import (
    Array,
    Labels,
    as_labels,
    as_matrix,
    centre,
    check_alphas,
    check_finite,
    same_rows,
)
from forge_interp.analysis.ridge import DEFAULT_ALPHAS, RidgePath, fit_path
from forge_interp.errors import InterpError

Fold = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class ProbeCurve:
    """Held-out scores of one probe per layer."""

    layers: tuple[str, ...]
    scores: np.ndarray  # [layers, F] accuracy, or R^2 (mean over targets) of a ridge probe
    control: np.ndarray | None  # [layers, F] the same for the control task; None without `types`
    unit: str  # "accuracy" or "R2"

    @property
    def selectivity(self) -> np.ndarray:
        """[layers] mean score minus mean control score: what is not the memory of the probe."""
        if self.control is None:
            raise InterpError("no control task was run; expected probe_layers(..., types=...)")
        return self.scores.mean(1) - self.control.mean(1)


@dataclass(frozen=True)
class LogisticFit:
    """A fitted logistic regression."""

    weights: Tensor  # [d, C] float64; C = K classes, 1 for two classes, T for multi-label
    intercept: Tensor  # [C] float64
    classes: np.ndarray | None  # [K] labels in the order of the columns; None for multi-label

    def logits(self, x: Array) -> Tensor:
        """Return [n, C] log-odds, float64."""
        return as_matrix(x, "x").to(self.weights.device) @ self.weights + self.intercept

    def predict(self, x: Array) -> np.ndarray:
        """Return [n] labels, or [n, T] zeros and ones for multi-label."""
        logits = self.logits(x)
        if self.classes is None:
            return (logits > 0).cpu().numpy().astype(np.int64)
        picked = (logits[:, 0] > 0).long() if logits.shape[1] == 1 else logits.argmax(1)
        return self.classes[picked.cpu().numpy()]


def fit_logistic(x: Array, y: Array, *, alpha: float = 1.0, max_steps: int = 1000) -> LogisticFit:
    """Fit logistic regression: minimize sum_i loss_i + alpha / 2 |W|_F^2 by L-BFGS, intercept unpenalized.

    The loss is the softmax cross-entropy for K >= 3 classes, the binary one for two classes and for each
    label of a multi-label target; alpha is 1 / C of scikit-learn. `x` [n, d] is not rescaled: z-score
    features whose units differ; `y` are [n] labels (integers or strings), or [n, T] zeros and ones
    (multi-label). InterpError for one class only, rows that differ, a value that is not finite, or no
    convergence.

    Source: Liu and Nocedal 1989, Math. Program. 45:503 (L-BFGS).
    """
    (penalty,) = check_alphas([alpha])
    x = as_matrix(x, "x")
    check_finite(x, "x")
    classes, target, loss, num_columns = _logistic_target(y, x)
    same_rows({"x": x, "y": target})
    mean = x.mean(0)
    x = x - mean
    weights = x.new_zeros(x.shape[1], num_columns).requires_grad_()
    intercept = x.new_zeros(num_columns).requires_grad_()
    solver = torch.optim.LBFGS(
        [weights, intercept],
        max_iter=max_steps,
        history_size=20,
        tolerance_grad=1e-9,
        tolerance_change=1e-14,
        line_search_fn="strong_wolfe",
    )

    def objective() -> Tensor:
        solver.zero_grad()
        value = (loss(x @ weights + intercept, target) + penalty / 2 * weights.square().sum()) / len(x)
        value.backward()
        return value

    solver.step(objective)
    objective()
    slope = max(float(p.grad.abs().max()) for p in (weights, intercept) if p.grad is not None)
    if slope > 1e-5:
        raise InterpError(
            f"L-BFGS stopped after {max_steps} steps with gradient {slope:.1e}; expected below 1e-5: "
            "z-score the features, raise alpha or max_steps"
        )
    weights, intercept = weights.detach(), intercept.detach()
    return LogisticFit(weights, intercept - mean @ weights, classes)


def group_folds(groups: Labels, num_folds: int = 5, *, seed: int = 0) -> list[Fold]:
    """Split samples into folds that never share a group (a sentence, a run, a subject), sizes balanced.

    Groups are taken in random order, large ones first, each to the fold with fewest samples so far. `groups`
    [n] are the label of each sample's group; `range(n)` for plain k-fold. Returns `num_folds` pairs (train,
    test) of sorted sample indices.
    """
    names, inverse, counts = np.unique(np.asarray(groups), return_inverse=True, return_counts=True)
    if not 2 <= num_folds <= len(names):
        raise InterpError(
            f"num_folds is {num_folds} for {len(names)} groups; expected at least 2, and no more than groups"
        )
    order = np.random.default_rng(seed).permutation(len(names))
    order = order[np.argsort(-counts[order], kind="stable")]
    fold_of, sizes = np.empty(len(names), np.int64), np.zeros(num_folds, np.int64)
    for group in order:
        fold = int(sizes.argmin())
        fold_of[group] = fold
        sizes[fold] += counts[group]
    owner = fold_of[inverse]
    return [(np.flatnonzero(owner != fold), np.flatnonzero(owner == fold)) for fold in range(num_folds)]


def control_task(types: Labels, y: np.ndarray, *, seed: int = 0) -> np.ndarray:
    """Draw targets that a layer cannot know: one at random per type of input, always the same.

    A probe can learn it only by memorizing types, so a score on the real task that is not above this one
    shows the capacity of the probe, not what the layer encodes. `types` [n] are the identities of the inputs,
    e.g. token ids; `y` [n] or [n, T] real targets, whose distribution and shape are kept.

    Source: Hewitt and Liang 2019, arXiv:1909.03368.
    """
    names, inverse = np.unique(np.asarray(types), return_inverse=True)
    y = np.asarray(y)
    if len(inverse) != len(y):
        raise InterpError(f"types has {len(inverse)} entries, y has {len(y)}; expected one type per sample")
    return y[np.random.default_rng(seed).integers(len(y), size=len(names))][inverse]


def probe_layers(
    layers: Mapping[str, Array],
    y: Array,
    *,
    kind: str | None = None,
    groups: Labels | None = None,
    types: Labels | None = None,
    alphas: Sequence[float] | None = None,
    num_folds: int = 5,
    seed: int = 0,
) -> ProbeCurve:
    """Cross-validate one linear probe per layer, with a control task.

    Features are z-scored by the training fold. The penalty is chosen inside each training fold, by its own
    folds of whole groups (by exact leave-one-out for ridge without groups), so a test sample touches no
    choice.

    Args:
        layers: {name: [n, d]}.
        y: ridge: [n] or [n, T] numbers; logistic: [n] labels or [n, T] zeros and ones.
        kind: "ridge" (score R^2, mean over targets) or "logistic" (score accuracy, mean over labels).
            Default: ridge for floating-point numbers, logistic for labels: integers, booleans or strings.
        groups: [n] samples of one group never sit on both sides of a split; default each its own.
        types: [n] input identities for the control task, see `control_task`; default no control.
        alphas: penalties to choose from; default 1e-2 to 1e6 for ridge, 1e-1 to 1e3 for logistic.
        num_folds: outer folds F; 3 inner folds (2 if groups are few).
        seed: of folds and control task.

    Source: Alain and Bengio 2016, arXiv:1610.01644 (probes); Hewitt and Liang 2019 (selectivity).
    """
    target = as_labels(y)
    kind = kind or ("ridge" if target.dtype.kind == "f" else "logistic")
    if kind not in _FITS:
        raise InterpError(f"kind is {kind!r}; expected one of {list(_FITS)}")
    candidates = check_alphas(_ALPHAS[kind] if alphas is None else alphas)
    members = None if groups is None else np.asarray(groups)
    if members is not None and members.shape != (len(target),):
        raise InterpError(f"groups has shape {members.shape}; expected ({len(target)},), one per sample")
    folds = group_folds(np.arange(len(target)) if members is None else members, num_folds, seed=seed)
    tasks = [target] if types is None else [target, control_task(types, target, seed=seed)]
    scores = np.empty((len(tasks), len(layers), num_folds))
    for i, (name, layer) in enumerate(layers.items()):
        x = as_matrix(layer, name)
        check_finite(x, name)
        if len(x) != len(target):
            raise InterpError(f"{name} has {len(x)} rows, y has {len(target)}; expected the same samples")
        for fold, (train, test) in enumerate(folds):
            x_train, x_test = z_score(x[train], x[test])
            inner = None if members is None else members[train]
            for task, labels in enumerate(tasks):
                split = _Split(x_train, labels[train], x_test, labels[test], inner, candidates)
                scores[task, i, fold] = _FITS[kind](split)
    unit = "R2" if kind == "ridge" else "accuracy"
    return ProbeCurve(tuple(layers), scores[0], scores[1] if len(tasks) == 2 else None, unit)


def z_score(train: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """Scale columns to mean 0 and standard deviation 1 over `train`; columns constant there become 0."""
    mean, scale = train.mean(0), centre(train).square().mean(0).sqrt()
    scale = torch.where(scale > 0, scale, torch.inf)
    return tuple((part - mean) / scale for part in (train, *others))


def r_squared(y: Tensor, prediction: Tensor) -> Tensor:
    """[T] 1 - residual / total sum of squares around the mean of `y`; NaN for a target that never varies."""
    total = centre(y).square().sum(0)
    return 1 - (y - prediction).square().sum(0) / torch.where(total > 0, total, torch.nan)


class _Split(NamedTuple):
    """What a fold trains on and is scored on, with the groups of the training rows."""

    x: Tensor
    y: np.ndarray
    x_test: Tensor
    y_test: np.ndarray
    groups: np.ndarray | None
    alphas: list[float]


def _ridge_score(split: _Split) -> float:
    x, groups, alphas = split.x, split.groups, split.alphas
    target, held_out = as_matrix(split.y, "y").to(x.device), as_matrix(split.y_test, "y").to(x.device)
    check_finite(target, "y")
    path = RidgePath(x)
    if groups is None:
        errors = torch.stack([path.leave_one_out(target, alpha).square().mean(0) for alpha in alphas])
    else:
        errors = x.new_zeros(len(alphas), target.shape[1])
        for train, test in _inner_folds(groups):
            part, fitted = RidgePath(x[train]), target[train]
            guess = part.predict(x[test], part.project(fitted), alphas) + fitted.mean(0)
            errors += (guess - target[test]).square().sum(1)
    fit = fit_path(path, target, x.new_tensor(alphas)[errors.argmin(0)])
    scores = r_squared(held_out, fit.predict(split.x_test))
    if scores.isnan().any():
        constant = scores.isnan().nonzero()[:, 0].tolist()
        raise InterpError(
            f"targets {constant} never vary in a held-out fold of {len(held_out)} samples, where R^2 is "
            "undefined; expected fewer folds, or only targets that vary"
        )
    return scores.mean().item()


def _logistic_score(split: _Split) -> float:
    x, y, alphas = split.x, split.y, split.alphas
    alpha = alphas[0]
    if len(alphas) > 1:
        folds = list(_inner_folds(np.arange(len(y)) if split.groups is None else split.groups))
        hits = [
            sum((fit_logistic(x[a], y[a], alpha=alpha).predict(x[b]) == y[b]).sum() for a, b in folds)
            for alpha in alphas
        ]
        alpha = alphas[int(np.argmax(hits))]
    return float((fit_logistic(x, y, alpha=alpha).predict(split.x_test) == split.y_test).mean())


def _inner_folds(groups: np.ndarray) -> Iterator[Fold]:
    yield from group_folds(groups, min(3, max(2, len(np.unique(groups)))))


_FITS: Mapping[str, Callable[[_Split], float]] = {"ridge": _ridge_score, "logistic": _logistic_score}
_ALPHAS: Mapping[str, Sequence[float]] = {
    "ridge": DEFAULT_ALPHAS,
    "logistic": (0.1, 1.0, 10.0, 100.0, 1000.0),
}


def _logistic_target(
    y: Array, x: Tensor
) -> tuple[np.ndarray | None, Tensor, Callable[[Tensor, Tensor], Tensor], int]:
    """The classes, the target of the loss, the loss, and the number of its logits."""
    binary = partial(F.binary_cross_entropy_with_logits, reduction="sum")
    labels = as_labels(y)
    if labels.dtype.kind == "f":
        check_finite(torch.as_tensor(labels), "y")
    if labels.ndim == 2:
        if not np.isin(labels, (0, 1)).all():
            raise InterpError(
                "y [n, T] holds other values than zeros and ones; expected kind='ridge' for numbers"
            )
        return None, torch.as_tensor(labels).to(x), binary, labels.shape[1]
    classes, codes = np.unique(labels, return_inverse=True)
    if len(classes) < 2:
        raise InterpError(f"y has the classes {classes.tolist()}; expected at least two")
    target = torch.as_tensor(codes, device=x.device)
    if len(classes) == 2:
        return classes, target[:, None].to(x.dtype), binary, 1
    return classes, target, partial(F.cross_entropy, reduction="sum"), len(classes)
