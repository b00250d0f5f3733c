# %% [markdown]
# # How it learns: a series of checkpoints
#
# A run keeps checkpoints at growing distances, from its random weights on. Then each of them is evaluated by one command,
# opened, and compared with the last one: what is learnt early, what late, and in which layer?
#
# **You need:** two minutes of one CPU core. No GPU, no download.

# %% [markdown]
# ## Train, and keep a series
#
# `keep_initial` keeps what the run began with, `keep_growing = 2` the steps that grow by this factor.

# %%
from pathlib import Path

RUN = """
[job]
name = "series"

[model]
vocab_size = 260
max_tokens = 64
dim = 64
num_layers = 4
attention.num_heads = 4
ffn.dim = 128

[data]
max_tokens = 64
tokenizer.type = "bytes"

[[data.sources]]
type = "python-stdlib"
held_out = 0.02

[train]
steps = 320
global_batch = 16
micro_batch = 16
log_every_steps = 80

[optimizer]
type = "adamw"
lr = 6e-3

[schedule]
type = "cosine"
warmup_steps = 20

[eval]
every_steps = 0

[checkpoint]
every_steps = 320
keep_initial = true
keep_growing = 2.0
"""
Path("series.toml").write_text(RUN)
# !forge train series.toml 2>&1 | cat

# %% [markdown]
# ## Evaluate them all

# %%
# !forge eval runs/series --step all --table loss.csv 2>&1 | cat
# !cat loss.csv

# %% alt: Validation loss by step on a logarithmic axis; it falls from ln 260 = 5.6 to below 2.5 nats.
import csv
import math

from matplotlib import pyplot as plt

with open("loss.csv") as file:
    rows = list(csv.DictReader(file))
column = next(name for name in rows[0] if name.endswith("loss"))
steps, losses = [int(row["step"]) for row in rows], [float(row[column]) for row in rows]
figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
axes.plot(steps, losses, marker="o")
axes.axhline(math.log(260), color="grey", linestyle="--", label="chance, ln 260")
axes.set_xscale("symlog", linthresh=5)
axes.set(xlabel="step", ylabel="validation loss (nats a byte)", xlim=(0, None))
axes.legend()
plt.show()
assert losses[-1] < 2.6 < losses[0]

# %% [markdown]
# ## When does each layer become what it will be?
#
# The same text goes through every checkpoint. CKA of a layer with the same layer at the end says how much of its geometry is
# already there.

# %%
import sysconfig

import torch
from forge_interp import capture, compare_layers
from forge_trainer.commands.evaluate import load_model
from forge_trainer.run_dir.files import read_job

text = (Path(sysconfig.get_paths()["stdlib"]) / "argparse.py").read_bytes()[40000:][: 64 * 64]
tokens = torch.tensor(list(text)).view(64, 64)
job = read_job(Path("runs/series"))


def look(step):
    """{site: [tokens, dim]}, how surprised the model is at each byte, and its parameters, at a step."""
    model, _ = load_model(job, step=step)
    with torch.no_grad(), capture(model, ["embed", "layers.*"]) as acts:
        log_probs = model(tokens)[:, :-1].log_softmax(-1)
    loss = -log_probs.gather(-1, tokens[:, 1:, None])[..., 0]
    return {site: acts[site].flatten(0, 1) for site in acts}, loss, dict(model.named_parameters())


seen = {step: look(step) for step in steps}
last = seen[steps[-1]][0]

# %% alt: CKA of the embedding and of four layers with themselves at the end, by step; all rise to 1, later layers later.
alike = torch.stack(
    [torch.as_tensor(compare_layers(seen[step][0], last).values).diagonal() for step in steps]
)
figure, axes = plt.subplots(figsize=(6.5, 3.5), layout="constrained")
for number, site in enumerate(last):
    axes.plot(steps, alike[:, number], marker="o", label=site.removesuffix(":out"))
axes.set_xscale("symlog", linthresh=5)
axes.set(xlabel="step", ylabel="CKA with the last step", xlim=(0, None), ylim=(0, 1.05))
axes.legend()
plt.show()
for step, row in zip(steps, alike.tolist(), strict=True):
    print(f"step {step:4}", "  ".join(f"{value:.2f}" for value in row))
assert (alike[-1] > 0.999).all() and (alike[0] < alike[-2]).all()

# %% [markdown]
# ## First frequencies, then pairs, then words
#
# What could a model know that sees no context, or one byte of it? The frequencies of bytes and of pairs of bytes in the rest of the
# library predict this text as well as the two lines say.

# %% alt: Loss of three kinds of bytes by step: spaces within an indentation are learnt first, letters within words next, first letters of words last.
paths = [path for path in Path(sysconfig.get_paths()["stdlib"]).glob("*.py") if path.name != "argparse.py"]
rest = torch.tensor(list(b"".join(path.read_bytes() for path in sorted(paths)[:60])))
counts = 1e-3 + torch.bincount(rest, minlength=260).double()
pairs = 1e-3 + torch.bincount(260 * rest[:-1] + rest[1:], minlength=260**2).double().view(260, 260)
one = -(counts / counts.sum()).log()[tokens[:, 1:]].mean().item()
two = -(pairs / pairs.sum(1, keepdim=True)).log()[tokens[:, :-1], tokens[:, 1:]].mean().item()
words = ((tokens >= ord("A")) & (tokens <= ord("z"))).bool()
space = tokens == ord(" ")
kinds = {
    "space after space": space[:, :-1] & space[:, 1:],
    "letter after letter": words[:, :-1] & words[:, 1:],
    "letter after another byte": ~words[:, :-1] & words[:, 1:],
}
figure, axes = plt.subplots(figsize=(6.5, 3.5), layout="constrained")
for label, kind in kinds.items():
    axes.plot(steps, [seen[step][1][kind].mean() for step in steps], marker="o", label=label)
all_bytes = [seen[step][1].mean().item() for step in steps]
axes.plot(steps, all_bytes, color="black", label="all")
axes.axhline(one, color="grey", linestyle="--", label="frequencies of bytes")
axes.axhline(two, color="grey", linestyle=":", label="frequencies of pairs")
axes.set_xscale("symlog", linthresh=5)
axes.set(xlabel="step", ylabel="loss (nats a byte)", xlim=(0, None))
axes.legend(fontsize=8)
plt.show()
assert all_bytes[-1] < two < one < all_bytes[0]
print(f"frequencies {one:.2f}, pairs {two:.2f} nats; the model {all_bytes[-1]:.2f}")

# %% [markdown]
# ## How far do the weights move?

# %% alt: Distance of each kind of weights from where they began, relative to their size, by step; all grow.
first = seen[steps[0]][2]
figure, axes = plt.subplots(figsize=(6.5, 3.2), layout="constrained")
for label, part in {
    "embedding": "embed",
    "attention": ".attention.w",
    "feed-forward": ".ffn.",
    "head": "head",
}.items():
    names = [name for name in first if part in name]
    size = sum(first[name].square().sum() for name in names)
    moved = [sum((seen[step][2][name] - first[name]).square().sum() for name in names) for step in steps]
    axes.plot(steps, [(one / size).sqrt().item() for one in moved], marker="o", label=label)
axes.set_xscale("symlog", linthresh=5)
axes.set(xlabel="step", ylabel="distance from the start / size at the start", xlim=(0, None))
axes.legend()
plt.show()

# %% [markdown]
# Next: [what a run records while it trains](../interp/training.md), [checkpoints](../checkpoints.md), [studies with
# series](../study.md).
