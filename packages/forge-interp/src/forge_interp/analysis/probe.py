"""Can a linear readout find a property in a layer, and is it the layer or the readout that knows it?

The readouts are those of scikit-learn. Letters: n samples, d features, T targets or labels, F folds.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from forge_interp.analysis.arrays import Array, Labels, as_alphas, as_array, as_labels
from forge_interp.errors import InterpError, optional

_ALPHAS = {"ridge": np.logspace(-2, 6, 17), "logistic": np.logspace(-1, 3, 5)}


@dataclass(frozen=True)
class ProbeCurve:
    """Held-out scores of one probe per layer."""

    layers: tuple[str, ...]
    scores: np.ndarray  # [layers, F] accuracy, or R^2 (mean over targets) of a ridge probe
    control: np.ndarray | None  # [layers, F] the same for the control task; None without `types`
    unit: str  # "accuracy" or "R2"

    @property
    def selectivity(self) -> np.ndarray:
        """[layers] mean score minus mean control score: the part that the probe has not memorized."""
        if self.control is None:
            raise InterpError("no control task was run; expected probe_layers(..., types=...)")
        return self.scores.mean(1) - self.control.mean(1)


def control_task(types: Labels, y: np.ndarray, *, seed: int = 0) -> np.ndarray:
    """Draw targets that no layer encodes: each type of input gets one random target.

    A probe can learn them only by memorizing types, so a score on the real task that is not above this one
    shows the capacity of the probe, not what the layer encodes. `types` [n] are the identities of inputs,
    e.g. token ids; `y` [n] or [n, T] are the real targets, whose distribution and shape are kept.

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
    """Cross-validate one linear probe per layer, with a control task; on the CPU, by scikit-learn.

    Features are z-scored by the training fold. The penalty is chosen without the test samples, by folds of
    whole groups inside each training fold (by exact leave-one-out for ridge without groups).

    Args:
        layers: {name: [n, d]}.
        y: ridge: [n] or [n, T] numbers; logistic: [n] labels or [n, T] zeros and ones.
        kind: "ridge" (score R^2, mean over targets) or "logistic" (score accuracy, mean over labels).
            Default: ridge for floating-point numbers, logistic for labels: integers, booleans or strings.
        groups: [n] group of each sample; no group is on both sides of a split. Default: one group a sample.
        types: [n] input identities for the control task, see `control_task`; default no control.
        alphas: candidate penalties alpha |W|^2 (1 / C for logistic); ridge chooses one for each target.
            Default: 1e-2 to 1e6 for ridge, 1e-1 to 1e3 for logistic.
        num_folds: number F of outer folds; there are 3 inner folds (2 if groups are few).
        seed: seed of the folds and of the control task.

    InterpError where rows or values do not fit, a fit does not converge, or R^2 is undefined.
    Source: Alain and Bengio 2016, arXiv:1610.01644 (probes); Hewitt and Liang 2019 (selectivity).
    """
    optional("sklearn", "probe_layers", "probes")
    from sklearn.preprocessing import StandardScaler

    target = as_labels(y)
    kind = kind or ("ridge" if target.dtype.kind == "f" else "logistic")
    if kind not in _ALPHAS:
        raise InterpError(f"kind is {kind!r}; expected one of {list(_ALPHAS)}")
    target = target.astype(np.float64).reshape(len(target), -1) if kind == "ridge" else target
    candidates = as_alphas(_ALPHAS[kind] if alphas is None else alphas)
    members = None if groups is None else np.asarray(groups)
    _check(layers, target, members, num_folds)
    folds = group_folds(np.arange(len(target)) if members is None else members, num_folds, seed)
    tasks = [target] if types is None else [target, control_task(types, target, seed=seed)]
    scores = np.empty((len(tasks), len(layers), num_folds))
    for i, (name, layer) in enumerate(layers.items()):
        x = as_array(layer, name)
        if len(x) != len(target):
            raise InterpError(f"{name} has {len(x)} rows, y has {len(target)}; expected the same samples")
        for fold, (train, test) in enumerate(folds):
            scaler: Any = StandardScaler().fit(x[train])
            inner = None if members is None else members[train]
            for task, labels in enumerate(tasks):
                fit = _fit(kind, scaler.transform(x[train]), labels[train], candidates, inner)
                scores[task, i, fold] = _score(kind, labels[test], fit.predict(scaler.transform(x[test])))
    unit = "R2" if kind == "ridge" else "accuracy"
    return ProbeCurve(tuple(layers), scores[0], scores[1] if len(tasks) == 2 else None, unit)


def _check(layers: Mapping[str, Array], y: np.ndarray, groups: np.ndarray | None, num_folds: int) -> None:
    """Raise InterpError where layers, targets, groups and folds do not fit."""
    if not layers:
        raise InterpError("there are no layers; expected at least one")
    if y.dtype.kind == "f" and not np.isfinite(y).all():
        raise InterpError("y holds values that are NaN or infinite; expected finite: drop those rows")
    if groups is not None and groups.shape != (len(y),):
        raise InterpError(f"groups has shape {groups.shape}; expected ({len(y)},), one per sample")
    most = len(y) if groups is None else len(np.unique(groups))
    if not 2 <= num_folds <= most:
        what = "samples" if groups is None else "groups"
        raise InterpError(f"num_folds is {num_folds}, with {most} {what}; expected from 2 to {most}")


def group_folds(groups: np.ndarray, num_folds: int, seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return balanced pairs (train, test) of sample indices; equally large groups are spread at random."""
    from sklearn.model_selection import GroupKFold

    names, codes = np.unique(groups, return_inverse=True)
    order = np.random.default_rng(seed).permutation(len(names))
    return list(GroupKFold(num_folds).split(codes, groups=order[codes]))


def _fit(kind: str, x: np.ndarray, y: np.ndarray, alphas: np.ndarray, groups: np.ndarray | None) -> Any:
    """Return the scikit-learn model whose penalties predict held-out samples best."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression, Ridge, RidgeCV
    from sklearn.model_selection import cross_val_predict
    from sklearn.multiclass import OneVsRestClassifier

    def model(alpha: Any) -> Any:
        if kind == "ridge":
            return Ridge(alpha=alpha)
        logistic = LogisticRegression(C=1 / alpha, tol=1e-6, max_iter=1000)
        return OneVsRestClassifier(logistic) if y.ndim == 2 else logistic

    if kind == "ridge" and groups is None:
        return RidgeCV(alphas, alpha_per_target=True).fit(x, y)
    best = alphas[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        try:
            if len(alphas) > 1:
                members = np.arange(len(y)) if groups is None else groups
                folds = group_folds(members, min(3, max(2, len(np.unique(members)))))
                guesses = [np.asarray(cross_val_predict(model(a), x, y, cv=folds)) for a in alphas]
                if kind == "ridge":  # a penalty for each target
                    errors = [np.square(guess.reshape(y.shape) - y).sum(0) for guess in guesses]
                else:
                    errors = [(guess != y).sum() for guess in guesses]
                best = alphas[np.argmin(errors, axis=0)]
            return model(best).fit(x, y)
        except ConvergenceWarning as error:
            raise InterpError(f"{error}; expected convergence: raise alphas") from error


def _score(kind: str, y: np.ndarray, guess: np.ndarray) -> float:
    from sklearn.metrics import r2_score

    if kind == "logistic":
        return float((guess == y).mean())
    if (constant := np.flatnonzero(np.ptp(y, axis=0) == 0)).size:
        raise InterpError(
            f"targets {constant.tolist()} never vary in a held-out fold of {len(y)} samples, where R^2 is "
            "undefined; expected fewer folds, or only targets that vary"
        )
    return float(r2_score(y, guess))
