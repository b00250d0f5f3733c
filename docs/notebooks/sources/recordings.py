# %% [markdown]
# # A simulated brain hears a story
#
# Three areas listen to a text. One follows what the first layer of a language model adds, one what
# its last layer adds, and one follows nothing at all. Can the recordings tell which is which, how much the noise allows, and that the third area is silent?
#
# **You need:** one minute of one CPU core. No GPU, no download.

# %% [markdown]
# ## A model that reads
#
# It learns the bytes of the Python standard library, from random weights.

# %%
from pathlib import Path

RUN = """
[job]
name = "listener"

[model]
vocab_size = 260
max_tokens = 128
dim = 48
num_layers = 4
attention.num_heads = 4
ffn.dim = 128

[data]
max_tokens = 128
tokenizer.type = "bytes"

[[data.sources]]
type = "python-stdlib"
held_out = 0.02

[train]
steps = 150
global_batch = 16
micro_batch = 16
log_every_steps = 50

[optimizer]
type = "adamw"
lr = 4e-3

[schedule]
type = "cosine"
warmup_steps = 20

[checkpoint]
every_steps = 150
"""
Path("listener.toml").write_text(RUN)
# !forge train listener.toml 2>&1 | cat

# %% [markdown]
# ## Five stories, word by word
#
# The words are those of five chapters of Python's own documentation, read aloud at two words a second. A model reads
# bytes, so the letters of each word have to be found again: `word_samples` asks the tokenizer where its tokens begin and
# end. Each sample is a word and the six words before it; `where="word"` keeps the rows of the word, of which `pool` takes
# the last, and the site is what the feed-forward part of each layer adds: the sum of all, which each layer hands on, changes
# little from one layer to the next. This decoder takes no mask: it never looks at what comes behind, and no row is made of padding.

# %%
import re
from pydoc_data.topics import topics

import numpy as np
from forge_interp import extract_representations
from forge_interp.recordings import word_samples
from forge_trainer.commands.evaluate import load_model
from forge_trainer.run_dir.files import read_job

CHAPTERS = ("assignment", "binary", "class", "calls", "import")
stories = [re.findall(r"\b[A-Za-z]{1,14}\b", topics[name])[:250] for name in CHAPTERS]
random = np.random.default_rng(0)
onsets = [np.cumsum(random.uniform(0.3, 0.7, len(words))) for words in stories]  # seconds


def tokenize(text, return_offsets_mapping):
    ids = list(text.encode())
    return {"input_ids": ids, "offset_mapping": [(place, place + 1) for place in range(len(ids))]}


model, _ = load_model(read_job(Path("runs/listener")))
samples = [sample for words in stories for sample in word_samples(words, tokenize, before=6)]
store = extract_representations(
    model, samples, "layers.*.ffn:out", where="word", pool="last", mask=None, batch_size=64, progress=False
)
print(*stories[0][:12], "...")
print({site: tuple(store[site].shape) for site in store.sites})

# %% [markdown]
# ## What a scanner would see of a layer
#
# A scan every 1.5 seconds. The blood response to a word peaks after five seconds, so words blur into each other.

# %% alt: Above, one feature of the first layer for each word of a minute, which jumps from word to word; below, the same feature convolved with the blood response at each scan, a smooth curve.
from forge_interp.recordings import at_scans
from matplotlib import pyplot as plt

scans = [np.arange(1.5, times[-1] + 6, 1.5) for times in onsets]
runs = np.repeat(CHAPTERS, [len(times) for times in scans])
ends = np.cumsum([len(words) for words in stories])[:-1].tolist()
layers = {}
for site in store.sites:
    words = np.split(store[site].double().numpy(), ends)
    layers[site] = np.concatenate([at_scans(*parts) for parts in zip(words, onsets, scans, strict=True)])

figure, axes = plt.subplots(2, figsize=(8, 3.4), sharex=True, layout="constrained")
axes[0].stem(onsets[0], store[store.sites[0]][: len(onsets[0]), 3], markerfmt=" ", basefmt=" ")
axes[1].plot(scans[0], layers[store.sites[0]][: len(scans[0]), 3], marker=".")
axes[0].set(ylabel="at words", title="one feature of the first layer")
axes[1].set(ylabel="at scans", xlabel="seconds", xlim=(0, 60))
plt.show()

# %% [markdown]
# ## The brain
#
# Twenty voxels in each area, recorded three times with noise. Each voxel is a random mixture of the features of its
# layer; the silent area has noise alone, that remembers the scan before, as real noise does.

# %%
from forge_interp.recordings import noise_ceiling

AREAS = {"early": store.sites[0], "late": store.sites[-1], "silent": None}


def standard(x):
    return (x - x.mean(0)) / x.std(0)


def noise(*shape):
    out = random.normal(size=shape)
    for scan in range(1, shape[1]):
        out[:, scan] = 0.5 * out[:, scan - 1] + 0.75**0.5 * out[:, scan]
    return out


voxels = [
    standard(standard(layers[site]) @ random.normal(size=(48, 20))) if site else np.zeros((len(runs), 20))
    for site in AREAS.values()
]
signal = np.concatenate(voxels, axis=1)
repeats = signal + 0.7 * noise(3, *signal.shape)
recordings = repeats.mean(0)
ceiling = noise_ceiling(repeats, runs)
for number, area in enumerate(AREAS):
    print(f"{area:7} noise ceiling {ceiling[20 * number :][:20].mean():.2f}")
print(f"closed form of the first two: {(1 / (1 + 0.49 / 3)) ** 0.5:.2f}")

# %% [markdown]
# ## Which layer predicts which voxel?
#
# Ridge regression, each chapter held out in turn; one penalty a voxel, chosen from the other four. A voxel belongs to the
# layer that predicts it best.

# %% alt: A map of four layers by sixty voxels: early and late areas are bright in all rows, dots mark the first layer as the best of the early area and the last as that of the late area; the silent area is dark.
from forge_interp.recordings import encode

alphas = np.logspace(0, 5, 11)
found = {site: encode(features, recordings, runs, alphas=alphas) for site, features in layers.items()}
r = np.stack([one.r.mean(0) for one in found.values()])
figure, axes = plt.subplots(figsize=(9, 2.6), layout="constrained")
image = axes.imshow(r, aspect="auto", cmap="viridis", vmin=0, vmax=1)
axes.set_yticks(range(4), [site.removesuffix(".ffn:out") for site in store.sites])
axes.set_xticks([9.5, 29.5, 49.5], AREAS)
axes.scatter(range(40), r.argmax(0)[:40], marker=".", color="white", label="best layer")
axes.legend(loc="lower right")
figure.colorbar(image, label="held-out r")
plt.show()

truth = np.repeat([0, 3], 20)
best = r.argmax(0)[:40]
share = r[truth, np.arange(40)] / ceiling[:40]
print(f"voxels whose best layer is the true one: {(best == truth).mean():.0%}")
print(f"of what noise allows, the true layer explains {np.median(share):.2f} (r / ceiling, median)")
assert (best == truth).mean() > 0.85 and 0.85 < np.median(share) < 1.1

# %% [markdown]
# The layers between score well, too: they carry much of what their neighbours do. So ask what each of the two adds when
# both are given, with a penalty each (banded ridge). The parts sum to the R² of the whole; one
# may be above it, where the other is below 0.

# %% alt: Bars for sixty voxels: in the early area nearly all of R squared is the part of the first layer, in the late area that of the last, in the silent area there is none.
bands = {name: layers[AREAS[name]] for name in ("early", "late")}
both = encode(bands, recordings, runs, alphas=alphas[::2], draws=10)
parts = both.band_r2.mean(0)
figure, axes = plt.subplots(figsize=(9, 2.6), layout="constrained")
below = np.zeros(60)
for name, part in zip(bands, parts.clip(0), strict=True):
    axes.bar(range(60), part, bottom=below, width=1.0, label=f"what the {name} layer adds")
    below += part
axes.set_xticks([9.5, 29.5, 49.5], AREAS)
axes.set(ylabel="held-out R²")
axes.legend()
plt.show()
assert np.allclose(both.band_r2.sum(1), both.r2)
assert (parts.argmax(0)[:40] == np.repeat([0, 1], 20)).mean() > 0.9

# %% [markdown]
# ## Is it more than chance?
#
# The last chapter is the test: its recordings are shuffled, in blocks of ten scans, against what is predicted for it.

# %%
tested = encode(
    layers[store.sites[0]], recordings, runs, test_runs=[CHAPTERS[-1]], alphas=alphas, permutations=999
)
for number, area in enumerate(AREAS):
    p = tested.p[20 * number :][:20]
    print(f"{area:7} {(p < 0.05).mean():.0%} of the voxels have p < 0.05; the median p is {np.median(p):.3f}")
assert (tested.p[:20] < 0.05).mean() > 0.9 and (tested.p[40:] < 0.05).mean() <= 0.2

# %% [markdown]
# Next: [encoding models, step by step](../interp/encoding_model.md), [geometries](../interp/rsa.md), [extraction of large
# data sets](../interp/extract.md).
