"""Analyses a table of runs: one function for each question, with intervals, doubts and a picture."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from forge_trainer.study.config import AnalysisConfig
from forge_trainer.study.optima import FAR, Optimum, Trend, optimum, trend
from forge_trainer.study.picture import Series, picture
from forge_trainer.study.scaling import FEWEST, Scaling, bootstrap, fit, interval
from forge_trainer.study.table import Row, groups, lowest

CLOSE = 1.05
"""Budgets of FLOPs and lengths in tokens that differ by at most this factor count as equal."""

Curve = Callable[[str], list[tuple[float, float, float]]]


@dataclass
class Finding:
    """The answer to a question about the runs.

    Attributes:
        name: name of its files.
        title: title for a person.
        lines: results in words.
        doubts: reasons to doubt the results.
        numbers: results for programs.
        svg: its picture; empty if there is none.
    """

    name: str
    title: str
    lines: list[str] = field(default_factory=list[str])
    doubts: list[str] = field(default_factory=list[str])
    numbers: dict[str, Any] = field(default_factory=dict[str, Any])
    svg: str = ""


def law(rows: Sequence[Row], how: AnalysisConfig) -> Finding | None:
    """Fit the parametric law of the loss; None if there are too few runs."""
    best = lowest(rows, how.loss, "parameters", "tokens")
    n, d, y = ([row[key] for row in best] for key in ("parameters", "tokens", how.loss))
    if len(best) <= FEWEST or len({*n}) < 3:
        return None
    if min(y) <= 0:
        doubt = f"{how.loss} is {min(y):g} in a run; a law is of losses above 0: set analysis.loss to one"
        return Finding("law", "Loss by parameters and tokens", doubts=[doubt])
    found = fit(n, d, y)
    laws = bootstrap(n, d, y, how.bootstrap, how.seed, found)
    finding = Finding("law", "Loss by parameters and tokens")
    between = {
        key: interval([of(one) for one in laws], how.level, len(best))
        for key, of in (
            ("alpha", lambda one: one.alpha), ("beta", lambda one: one.beta), ("e", lambda one: one.e),
            ("size_exponent", lambda one: one.size_exponent),
        )
    }  # fmt: skip
    error = float(np.mean([abs(found.loss(*size) / loss - 1) for *size, loss in zip(n, d, y, strict=True)]))
    finding.lines = [
        f"L = {found.e:.4g} + {found.a:.4g} / N^{found.alpha:.4g} + {found.b:.4g} / D^{found.beta:.4g}, from "
        f"{len(best)} runs, {error:.2%} off on average",
        *(
            f"{key} in [{low:.4g}, {high:.4g}] at {how.level:.0%}"
            for key, (low, high) in between.items()
        ),
    ]  # fmt: skip
    finding.numbers = {**found._asdict(), "runs": len(best), "error": error, "intervals": between}
    finding.doubts = _law_doubts(n, d, between)
    if found.e < 1e-3 * min(y):
        finding.doubts.append("the loss that no size reaches is fitted as 0: all runs are far from it")
    finding.numbers["predictions"] = [
        _predicted(finding, found, laws, how, n, d, *size) for size in how.predict
    ]
    finding.svg = _law_picture(found, n, d, y, how.loss)
    return finding


def _law_doubts(n: Sequence[float], d: Sequence[float], between: dict[str, tuple[float, float]]) -> list[str]:
    found: list[str] = []
    for what, values in (("sizes", n), ("tokens", d)):
        if (span := max(values) / min(values)) < FAR:
            found.append(f"{what} span a factor of {span:.2g}; an exponent needs {FAR:g} or more")
    if len(n) < 2 * FEWEST:
        found.append(f"{len(n)} runs for {FEWEST} constants; believe a fit of {2 * FEWEST} or more")
    if len({*d}) == 1:
        found.append("all runs have as many tokens: nothing says how the loss falls with them")
    elif np.corrcoef(np.log(n), np.log(d))[0, 1] > 0.98:
        found.append("tokens grow with the size in all runs, so that the two exponents cannot be told apart")
    for key in ("alpha", "beta"):
        if between[key][0] <= 0:
            found.append(f"the interval of {key} reaches 0: the runs do not determine it")
    return found


def _predicted(
    made: Finding,
    found: Scaling,
    laws: Sequence[Scaling],
    how: AnalysisConfig,
    n: Sequence[float],
    d: Sequence[float],
    *size: float,
) -> dict[str, Any]:
    """Predict the loss of another size and add it to `made`."""
    value = found.loss(*size)
    low, high = interval([one.loss(*size) for one in laws], how.level, len(n))
    far = max(
        size[0] / max(n), size[1] / max(d), size[0] * size[1] / max(a * b for a, b in zip(n, d, strict=True))
    )
    made.lines.append(
        f"{size[0]:.3g} parameters, {size[1]:.3g} tokens: loss {value:.4f} in [{low:.4f}, {high:.4f}]"
    )
    if far > FAR:
        made.doubts.append(f"{size[0]:.3g} parameters and {size[1]:.3g} tokens are {far:.3g} times what ran")
    return {"parameters": size[0], "tokens": size[1], "loss": value, "low": low, "high": high, "beyond": far}


def _law_picture(
    found: Scaling, n: Sequence[float], d: Sequence[float], y: Sequence[float], loss: str
) -> str:
    series: list[Series] = []
    tokens = np.geomspace(min(d), max(d), 40)
    for size in sorted({*n}):
        points = [(b, c) for a, b, c in zip(n, d, y, strict=True) if a == size]
        line = [(t, found.loss(size, t)) for t in tokens]
        series.append(Series(f"{size:.3g} parameters", points, line))
    return picture("Loss by parameters and tokens", "tokens", loss, series, log_y=True)


def isoflops(rows: Sequence[Row], how: AnalysisConfig) -> Finding | None:
    """Find the best size for each budget of FLOPs; None without a budget that several sizes have."""
    finding, series = Finding("isoflop", "Best size for a budget"), list[Series]()
    budgets: list[float] = []
    places: list[tuple[Optimum, float]] = []
    for members in _alike(rows, "flops"):
        best = lowest(members, how.loss, "parameters")
        if len(best) < 2:
            continue
        budget = float(np.exp(np.mean([math.log(row["flops"]) for row in best])))
        sizes, losses = [row["parameters"] for row in best], [row[how.loss] for row in best]
        place = optimum(sizes, losses, how.bootstrap, how.level, how.seed)
        order = np.argsort(sizes)
        sizes_log, tokens_log = (np.log([best[k][key] for k in order]) for key in ("parameters", "tokens"))
        tokens = float(np.exp(np.interp(math.log(place.x), sizes_log, tokens_log)))
        _add_optimum(finding, f"{budget:.3g} FLOPs", f"{place.x:.3g} parameters, {tokens:.3g} tokens", place)
        series.append(
            Series(f"{budget:.2g} FLOPs", [*zip(sizes, losses, strict=True)], _parabola(sizes, losses))
        )
        budgets.append(budget)
        places.append((place, tokens))
    if not budgets:
        return None
    numbers = [
        {"flops": c, "parameters": p.x, "low": p.low, "high": p.high, "tokens": t, "loss": p.loss}
        for c, (p, t) in zip(budgets, places, strict=True)
    ]
    finding.numbers["optima"] = numbers
    for name, values in (("parameters", [p.x for p, _ in places]), ("tokens", [t for _, t in places])):
        finding.numbers[name] = _trend(finding, name, "FLOPs", budgets, values, how)
    finding.svg = picture("Best size for a budget", "parameters", how.loss, series)
    return finding


def _alike(rows: Sequence[Row], key: str) -> list[list[Row]]:
    """Group rows with about the same FLOPs or tokens; all of a group are close to its lowest."""
    found: list[list[Row]] = []
    for row in sorted(rows, key=lambda row: row[key]):
        if found and row[key] <= CLOSE * found[-1][0][key]:
            found[-1].append(row)
        else:
            found.append([row])
    return found


def best_values(rows: Sequence[Row], how: AnalysisConfig, vary: str, *also: str) -> Finding | None:
    """Find the best learning rate (`lr`) or batch (`batch_tokens`), and how it changes with the size."""
    called = {"lr": "learning rate", "batch_tokens": "batch"}[vary]
    finding = Finding(f"best_{vary}", f"Best {called}")
    series, found = list[Series](), list[tuple[Row, Optimum]]()
    for common, members in _equally_long(finding, rows, vary, *also):
        values, losses = [row[vary] for row in members], [row[how.loss] for row in members]
        place = optimum(values, losses, how.bootstrap, how.level, how.seed)
        named = f"{common['parameters']:.3g} parameters, {common['optimizer']}, seed {common['seed']}"
        _add_optimum(finding, named, f"{called} {place.x:.3g}", place)
        series.append(
            Series(named.partition(", ")[0], [*zip(values, losses, strict=True)], _parabola(values, losses))
        )
        found.append((common, place))
    if not found and not finding.doubts:
        return None
    finding.numbers["optima"] = [
        {**common, vary: p.x, "low": p.low, "high": p.high, "loss": p.loss} for common, p in found
    ]
    finding.numbers["trends"] = {}
    for kind in dict.fromkeys(common["optimizer"] for common, _ in found):
        these = [(common["parameters"], place.x) for common, place in found if common["optimizer"] == kind]
        if len({size for size, _ in these}) > 1:
            sizes, places = zip(*these, strict=True)
            finding.numbers["trends"][kind] = _trend(finding, called, "parameters", sizes, places, how)
    finding.svg = picture(f"Best {called}", called, how.loss, series) if series else ""
    return finding


def _equally_long(
    made: Finding, rows: Sequence[Row], vary: str, *also: str
) -> Iterator[tuple[Row, list[Row]]]:
    """Yield groups of rows that differ in `vary` and saw about as many tokens; add doubts about others."""
    for common, members in groups(rows, vary, *also):
        parts = [part for part in _alike(members, "tokens") if len({row[vary] for row in part}) > 1]
        for part in parts:
            yield common, sorted(part, key=lambda row: row[vary])
        if not parts:
            tokens = [row["tokens"] for row in members]
            made.doubts.append(
                f"{common['parameters']:.3g} parameters: no two values of {vary} saw as many tokens "
                f"({min(tokens):.3g} to {max(tokens):.3g}), so they are not compared; give rules.tokens"
            )


def _add_optimum(finding: Finding, named: str, what: str, place: Optimum) -> None:
    between = f" in [{place.low:.3g}, {place.high:.3g}]" if place.high > place.low else ""
    finding.lines.append(f"{named}: {what}{between}, loss {place.loss:.4f}")
    finding.doubts += [f"{named}: {doubt}" for doubt in place.doubts]


def _trend(
    finding: Finding, what: str, over: str, xs: Sequence[float], ys: Sequence[float], how: AnalysisConfig
) -> dict[str, Any]:
    found: Trend = trend(xs, ys, how.bootstrap, how.level, how.seed)
    finding.lines.append(
        f"{what} = {found.factor:.3g} * {over}^{found.power:.3g}, the power in [{found.low:.3g}, "
        f"{found.high:.3g}]; to be believed up to {found.reach:.2g} {over}"
    )
    finding.doubts += [f"{what} over {over}: {doubt}" for doubt in found.doubts]
    return found._asdict()


def _parabola(xs: Sequence[float], ys: Sequence[float]) -> list[tuple[float, float]]:
    """Return the points of a parabola for the picture; empty if there are too few points."""
    if len({*xs}) < 3:
        return []
    logs = np.log(xs)
    curve = np.polynomial.Polynomial.fit(logs, ys, 2)
    return [(float(np.exp(x)), float(curve(x))) for x in np.linspace(logs.min(), logs.max(), 30)]


def seeds(rows: Sequence[Row], how: AnalysisConfig) -> Finding | None:
    """Measure how much the loss changes with the seed alone."""
    finding, squares, free = Finding("seeds", "What the seed changes"), 0.0, 0
    for common, members in groups(rows, "seed"):
        losses = np.array([row[how.loss] for row in members])
        squares, free = squares + float(((losses - losses.mean()) ** 2).sum()), free + len(losses) - 1
        finding.lines.append(
            f"{common['parameters']:.3g} parameters, {common['optimizer']}, lr {common['lr']:.3g}: "
            f"{losses.mean():.4f} +- {losses.std(ddof=1):.4f} over {len(losses)} seeds"
        )
    if not free:
        return None
    deviation = math.sqrt(squares / free)
    finding.numbers = {"deviation": deviation, "degrees_of_freedom": free}
    finding.lines.append(
        f"standard deviation {deviation:.4f}: of two single runs, a difference below "
        f"{2 * math.sqrt(2) * deviation:.4f} is noise"
    )
    if free < 4:
        finding.doubts.append(f"{free} degrees of freedom; believe a deviation of 4 or more")
    return finding
