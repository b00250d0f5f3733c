# %% [markdown]
# # A simulated brain looks at pictures
#
# Three areas see pictures. One follows an early layer of a vision network, one its last layer, and one follows nothing.
# Which layer predicts which area, is that more than what any network would do, and do distances between pictures say the
# same?
#
# **You need:** one minute of one CPU core. No GPU, no download.

# %% [markdown]
# ## Pictures
#
# A disc, a square, a triangle or a cross of random size, place and colour, before a striped ground of random colour and angle.

# %% alt: A row of ten small pictures, each with one disc, square, triangle or cross in front of stripes.
from itertools import pairwise

import numpy as np
import torch
from matplotlib import pyplot as plt
from torch import nn

SIZE, KINDS = 32, ("disc", "square", "triangle", "cross")


def draw(count, seed):
    """[count, 3, 32, 32] pictures and [count] the kind in each."""
    random = torch.Generator().manual_seed(seed)

    def uniform(low, high, *shape):
        return low + (high - low) * torch.rand(count, *shape, 1, 1, generator=random)

    y, x = torch.meshgrid(*[torch.linspace(-1, 1, SIZE)] * 2, indexing="ij")
    angle, phase, frequency = uniform(0, 3.14), uniform(0, 6.28), uniform(4, 12)
    stripes = (frequency * (angle.cos() * x + angle.sin() * y) + phase).sin()[:, None]
    ground = uniform(-0.6, 0.6, 3) + uniform(0.1, 0.3, 1) * stripes
    u, v, r = x - uniform(-0.4, 0.4), y - uniform(-0.4, 0.4), uniform(0.35, 0.6)
    inside = torch.stack(
        [
            u**2 + v**2 < r**2,
            torch.maximum(u.abs(), v.abs()) < 0.9 * r,
            (v < 0.8 * r) & (v > 2 * u.abs() - r),
            (torch.minimum(u.abs(), v.abs()) < 0.3 * r) & (torch.maximum(u.abs(), v.abs()) < r),
        ]
    )
    kind = torch.randint(4, (count,), generator=random)
    shape = inside[kind, torch.arange(count)][:, None]
    pictures = torch.where(shape, uniform(-1, 1, 3), ground)
    return pictures + 0.05 * torch.randn(pictures.shape, generator=random), kind


pictures, kinds = draw(10, seed=0)
figure, axes = plt.subplots(1, 10, figsize=(9, 1.3), layout="constrained")
for axis, picture, kind in zip(axes, pictures, kinds, strict=True):
    axis.imshow(((picture + 1.6) / 3.2).clamp(0, 1).permute(1, 2, 0))
    axis.set_title(KINDS[kind], fontsize=8)
    axis.axis("off")
plt.show()

# %% [markdown]
# ## A network that learns to name them
#
# Four stages of convolutions. A second one, with the same random start, is never trained: it is a control.

# %%


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        widths = (3, 12, 24, 32, 48)
        self.stages = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(a, b, 3, stride=1 if stage == 0 else 2, padding=1), nn.GroupNorm(4, b), nn.ReLU()
            )
            for stage, (a, b) in enumerate(pairwise(widths))
        )
        self.head = nn.Linear(widths[-1], len(KINDS))

    def forward(self, x):
        for stage in self.stages:
            x = stage(x)
        return self.head(x.mean((2, 3)))


torch.manual_seed(0)
untrained, model = Network(), Network()
model.load_state_dict(untrained.state_dict())
pictures, kinds = draw(4096, seed=1)
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=400)
for step in range(400):
    batch = slice(64 * step % 4096, 64 * step % 4096 + 64)
    loss = nn.functional.cross_entropy(model(pictures[batch]), kinds[batch])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()

seen, kinds = draw(360, seed=2)  # what the brain sees; none was trained on
with torch.no_grad():
    right = {
        name: (one(seen).argmax(-1) == kinds).float().mean().item()
        for name, one in (("trained", model), ("untrained", untrained))
    }
print({name: f"{share:.0%}" for name, share in right.items()})
assert right["trained"] > 0.85

# %% [markdown]
# ## What each stage says of the pictures
#
# `extract_representations` takes any model; `select` averages each map over a grid of 4 x 4, so that a picture is a row.

# %%
from forge_interp import extract_representations

RUNS = np.repeat(np.arange(6), 60)  # six runs of sixty pictures


def grid(maps):
    return nn.functional.adaptive_avg_pool2d(maps, 4).flatten(1)


def features(network):
    store = extract_representations(
        network, seen, "stages.*", select=grid, tokens=None, mask=None, batch_size=60, progress=False
    )
    return {f"stage {number}": store[f"stages.{number}:out"].double().numpy() for number in range(4)}


layers, control = features(model), features(untrained)
print({name: rows.shape for name, rows in layers.items()})

# %% [markdown]
# ## The brain
#
# Twenty voxels an area, each a random mixture of the features of its stage; each picture is seen three times, with noise.

# %%
from forge_interp.recordings import noise_ceiling

AREAS = {"early": "stage 0", "late": "stage 3", "silent": None}
random = np.random.default_rng(0)


def standard(x):
    return (x - x.mean(0)) / (x.std(0) + 1e-6)


voxels = []
for stage in AREAS.values():
    rows = standard(layers[stage]) if stage else np.zeros((len(RUNS), 1))
    voxels.append(rows @ random.normal(size=(rows.shape[1], 20)))
signal = np.concatenate([standard(area) for area in voxels], axis=1)
repeats = signal + random.normal(size=(3, *signal.shape))
recordings, ceiling = repeats.mean(0), noise_ceiling(repeats, RUNS)
for number, area in enumerate(AREAS):
    print(f"{area:7} noise ceiling {ceiling[20 * number :][:20].mean():.2f}")
print(f"closed form of the first two: {(1 / (1 + 1 / 3)) ** 0.5:.2f}")

# %% [markdown]
# ## Which stage predicts which area?
#
# Ridge regression with each run held out in turn, and two controls: the untrained network, and the trained one whose
# pictures are shuffled, so that each recording stands beside the features of another picture.

# %% alt: Three groups of bars, one for each area, the trained network beside two controls at four stages: for the early area the first stage of both networks reaches most of the ceiling, for the late area only the last stage of the trained one; shuffled pictures and the silent area are at zero.
from forge_interp.recordings import encode

alphas = np.logspace(0, 6, 7)
order = random.permutation(len(RUNS))
sources = {
    "trained": layers,
    "untrained": control,
    "shuffled": {name: rows[order] for name, rows in layers.items()},
}
scores = {
    source: np.stack([encode(rows, recordings, RUNS, alphas=alphas).r.mean(0) for rows in of.values()])
    for source, of in sources.items()
}  # [stages, voxels] of each
figure, axes = plt.subplots(1, 3, figsize=(9, 2.8), sharey=True, layout="constrained")
for number, (axis, area) in enumerate(zip(axes, AREAS, strict=True)):
    here = slice(20 * number, 20 * number + 20)
    for place, (source, r) in enumerate(scores.items()):
        axis.bar(np.arange(4) + 0.27 * (place - 1), r[:, here].mean(1), 0.25, label=source)
    axis.axhline(ceiling[here].mean(), color="black", linestyle=":", label="noise ceiling")
    axis.set(title=area, xticks=range(4), xlabel="stage")
axes[0].set_ylabel("held-out r")
axes[2].legend()
plt.show()

best, truth = scores["trained"].argmax(0)[:40], np.repeat([0, 3], 20)
for number, area in enumerate(list(AREAS)[:2]):
    here = slice(20 * number, 20 * number + 20)
    share = scores["trained"][truth[here], np.arange(60)[here]] / ceiling[here]
    print(
        f"{area:6} true stage is best in {(best == truth)[here].mean():.0%}; r / ceiling {np.median(share):.2f}"
    )
top = {source: r.max(0).reshape(3, 20).mean(1).round(2).tolist() for source, r in scores.items()}
print("the best stage of each area:", top)
assert (best == truth).mean() > 0.9 and max(top["shuffled"]) < 0.2
assert top["trained"][1] > 2 * top["untrained"][1] and top["trained"][2] < 0.15

# %% [markdown]
# Two numbers need their control. The untrained network predicts much of the early area: contrast and colour pass through
# any convolution, so that a high score there says little of what was learned. The late area it does not predict.
#
# ## What does each of two stages add?
#
# Banded ridge gives each its own penalty; the parts sum to the R² of the whole.

# %% alt: Bars for sixty voxels: in the early area R squared is the part of the first stage, in the late area that of the last stage, in the silent area there is none.
bands = {name: layers[AREAS[name]] for name in ("early", "late")}
both = encode(bands, recordings, RUNS, alphas=alphas, draws=10)
parts = both.band_r2.mean(0)
figure, axis = plt.subplots(figsize=(9, 2.4), layout="constrained")
below = np.zeros(60)
for name, part in zip(bands, parts.clip(0), strict=True):
    axis.bar(range(60), part, bottom=below, width=1.0, label=f"what {AREAS[name]} adds")
    below += part
axis.set_xticks([9.5, 29.5, 49.5], AREAS)
axis.set(ylabel="held-out R²")
axis.legend()
plt.show()
assert np.allclose(both.band_r2.sum(1), both.r2)
assert (parts.argmax(0)[:40] == np.repeat([0, 1], 20)).mean() > 0.9
print("parts:", parts.reshape(2, 3, 20).mean(2).round(2).tolist())

# %% [markdown]
# ## Do distances between pictures say the same?
#
# Representational similarity needs no fit: are pictures that a stage finds alike also alike in the area? Distances are 1 - r
# between pictures, of voxels or of features; RDMs are compared by rank.

# %% alt: A table of three areas by four stages: the early area is most like stage 0, the late area most like stage 3, the silent area is like none.
from scipy.spatial.distance import pdist
from scipy.stats import spearmanr

rdms = {name: pdist(standard(rows), "correlation") for name, rows in layers.items()}
areas = {area: pdist(recordings[:, 20 * n :][:, :20], "correlation") for n, area in enumerate(AREAS)}
alike = np.array([[spearmanr(a, b).statistic for b in rdms.values()] for a in areas.values()])
figure, axis = plt.subplots(figsize=(5, 2.4), layout="constrained")
image = axis.imshow(alike, vmin=0, cmap="viridis")
for (row, column), value in np.ndenumerate(alike):
    axis.text(
        column, row, f"{value:.2f}", ha="center", va="center", color="white" if value < 0.4 else "black"
    )
axis.set_xticks(range(4), layers)
axis.set_yticks(range(3), areas)
figure.colorbar(image, label="Spearman r of RDMs")
plt.show()
assert alike.argmax(1)[:2].tolist() == [0, 3]

# %% [markdown]
# Next: [encoding models, step by step](../interp/encoding_model.md), [geometries](../interp/rsa.md) with noise ceilings and
# crossnobis distances, [a brain that hears a story](recordings.ipynb).
