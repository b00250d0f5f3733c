# %% [markdown]
# # A scaling fit: which constants, how sure, and what does it say of a larger run?
#
# A scaling law is fitted to losses of small runs and then believed for a large one. Here the truth is known: the losses
# are computed from published constants, with noise. So it can be seen how well a fit finds them, how wide an honest interval is,
# and where a prediction goes wrong.
#
# **You need:** one minute of one CPU core. No GPU, no download.

# %% [markdown]
# ## Runs whose law is known
#
# `L = E + A / N^alpha + B / D^beta` for a model of N parameters after D tokens, with the constants of Hoffmann et al. 2022
# ([arXiv:2203.15556](https://arxiv.org/abs/2203.15556)): six sizes, six lengths, and 0.5 % noise as between two seeds.

# %%
import numpy as np
from forge_trainer.study.scaling import Scaling, bootstrap, fit, interval
from matplotlib import pyplot as plt

truth = Scaling(e=1.69, a=406.4, b=410.7, alpha=0.34, beta=0.28)
sizes, lengths = np.geomspace(1e7, 1e9, 6), np.geomspace(2e8, 2e10, 6)
n, d = (grid.flatten() for grid in np.meshgrid(sizes, lengths, indexing="ij"))
random = np.random.default_rng(0)
losses = np.array([truth.loss(*run) for run in zip(n, d, strict=True)]) * np.exp(
    random.normal(0, 0.005, len(n))
)

exact = fit(n, d, [truth.loss(*run) for run in zip(n, d, strict=True)])
print("without noise:", {name: round(float(value), 4) for name, value in exact._asdict().items()})
assert np.allclose(exact, truth, rtol=1e-2)

# %% [markdown]
# ## The fit, with intervals
#
# Losses are fitted as published (Huber loss of log L, from many starts), to the very minimum. An interval comes from fits to runs
# drawn anew, and is made wider for few runs.

# %% alt: For each of alpha, beta and E: the fitted value with its 90 % interval, and a cross for the truth, which lies within or near it.
found = fit(n, d, losses)
laws = bootstrap(n, d, losses, samples=100, seed=0, best=found)
between = {
    name: interval([getattr(law, name) for law in laws], 0.9, len(n)) for name in ("alpha", "beta", "e")
}
figure, axes = plt.subplots(1, 3, figsize=(8, 3), layout="constrained")
for place, (name, (low, high)) in zip(axes, between.items(), strict=True):
    value, true = getattr(found, name), getattr(truth, name)
    place.errorbar(
        [0], [value], [[max(value - low, 0)], [max(high - value, 0)]], fmt="o", capsize=6, label="fit, 90 %"
    )
    place.plot([0], [true], "rx", markersize=10, label="truth")
    place.set(title=name, xticks=[], xlim=(-1, 1), ylabel="nats a token" if name == "e" else "exponent")
    print(f"{name:5} fit {value:.3f} in [{low:.3f}, {high:.3f}], truth {true}")
figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
plt.show()

# %% alt: Losses of the runs by tokens, a colour for each size, with the fitted law as lines through them.
figure, axes = plt.subplots(figsize=(6.5, 4), layout="constrained")
for number, size in enumerate(sizes):
    mine = n == size
    axes.plot(d[mine], losses[mine], "o", color=f"C{number}", label=f"{size:.1e} parameters")
    line = np.geomspace(1e8, 1e11, 50)
    axes.plot(line, [found.loss(size, tokens) for tokens in line], color=f"C{number}", linewidth=1)
axes.set(xscale="log", xlabel="tokens", ylabel="loss (nats a token)")
axes.legend(fontsize=8)
plt.show()

# %% [markdown]
# ## Are the intervals honest?
#
# Draw the noise anew again and again: of intervals of 90 %, about nine in ten must hold the truth.

# %%
held = []
clean = np.array([truth.loss(*run) for run in zip(n, d, strict=True)])
for draw in range(20):
    noisy = clean * np.exp(np.random.default_rng(100 + draw).normal(0, 0.005, len(n)))
    best = fit(n, d, noisy)
    many = bootstrap(n, d, noisy, samples=40, seed=draw, best=best)
    row = {name: interval([getattr(law, name) for law in many], 0.9, len(n)) for name in between}
    held.append([low <= getattr(truth, name) <= high for name, (low, high) in row.items()])
share = np.mean(held, axis=0)
print({name: f"{one:.0%} of 20 hold the truth" for name, one in zip(between, share, strict=True)})
assert (share >= 0.7).all()

# %% [markdown]
# ## A prediction, and how far it reaches
#
# What does the law say of a model of 7 billion parameters after 140 billion tokens, seven times beyond both ranges? And what if only the
# smallest runs were there? The interval says how much less that is worth.

# %% alt: Two intervals of the predicted loss and a line for the truth; that from the smallest runs is far wider.
target = (7e9, 1.4e11)
true = truth.loss(*target)
small = (n < 1e8) & (d < 2e9)
figure, axes = plt.subplots(figsize=(6, 2.6), layout="constrained")
widths = []
for row, (label, part) in enumerate({"all 36 runs": n > 0, f"the smallest {small.sum()}": small}.items()):
    best = fit(n[part], d[part], losses[part])
    many = bootstrap(n[part], d[part], losses[part], samples=100, seed=0, best=best)
    low, high = interval([law.loss(*target) for law in many], 0.9, int(part.sum()))
    axes.plot([low, high], [row, row], linewidth=6, solid_capstyle="butt")
    axes.plot([best.loss(*target)], [row], "ko")
    print(f"{label:15} predict {best.loss(*target):.3f} in [{low:.3f}, {high:.3f}]; the truth is {true:.3f}")
    widths.append(high - low)
axes.axvline(true, color="red", linestyle="--", label="truth")
axes.set(
    yticks=[0, 1],
    yticklabels=["all runs", "smallest runs"],
    ylim=(-0.6, 1.6),
    xlabel="predicted loss (nats a token)",
)
axes.legend()
plt.show()
assert widths[1] > 2 * widths[0]

# %% [markdown]
# ## The best size for a budget
#
# With 6 N D FLOPs a run, the law says which size is best for each budget: N grows with compute to the power beta / (alpha + beta).

# %% alt: For three budgets, the loss by parameters: each a valley, whose lowest point moves to larger models as the budget grows.
figure, axes = plt.subplots(figsize=(6.5, 3.6), layout="constrained")
for flops in (1e18, 1e19, 1e20):
    candidates = np.geomspace(1e7, 2e10, 200)
    curve = np.array([found.loss(size, flops / (6 * size)) for size in candidates])
    best = candidates[curve.argmin()]
    axes.plot(candidates, curve, label=f"{flops:.0e} FLOPs")
    axes.plot([best], [curve.min()], "k.")
    print(
        f"{flops:.0e} FLOPs: {best:.2e} parameters, {flops / (6 * best):.2e} tokens, loss {curve.min():.3f}"
    )
axes.set(xscale="log", xlabel="parameters", ylabel="loss (nats a token)", ylim=(2.3, 5))
axes.legend()
plt.show()
print(f"N ~ C^{found.size_exponent:.2f}, truth {truth.size_exponent:.2f}")
assert abs(found.size_exponent - truth.size_exponent) < 0.1

# %% [markdown]
# `forge study FILE --analyse` does all of this for the runs of a study, and names what is not worth believing: see
# [studies](../study.md), which also has a ladder of real runs.
