# %% [markdown]
# # Compare optimizers fairly: a small study
#
# Which of AdamW, Muon and Lion brings a model furthest with the same text? Only after each has its own best learning
# rate: at one rate for all, the answer is whatever that rate favours. A study is one file that says which runs there are.
#
# **You need:** three minutes of one CPU core. No GPU, no download.

# %% [markdown]
# ## Nine runs
#
# Three optimizers, three learning rates each, four times apart. Each has a grid of its own: a best
# rate that lies at the edge of its grid proves nothing.

# %%
from pathlib import Path

BASE = """
[job]
name = "base"

[model]
vocab_size = 260
max_tokens = 64
dim = 64
num_layers = 2
attention.num_heads = 2
ffn.dim = 128

[data]
max_tokens = 64
tokenizer.type = "bytes"

[[data.sources]]
type = "python-stdlib"
held_out = 0.02

[train]
steps = 150
global_batch = 16
micro_batch = 16
log_every_steps = 5

[schedule]
type = "cosine"
warmup_steps = 15

[eval]
every_steps = 150

[checkpoint]
every_steps = 150
"""
rates = {"adamw": (1e-3, 4e-3, 1.6e-2), "muon": (8e-3, 3.2e-2, 0.128), "lion": (6e-4, 2.4e-3, 9.6e-3)}
options = {"muon": ', scale = "match-rms-adamw"'}
STUDY = 'name = "optimizers"\nbase = "base.toml"\n\n' + "".join(
    f'[[points]]\nname = "{name}-{lr:g}"\noptimizer = {{ type = "{name}", lr = {lr}{options.get(name, "")} }}\n'
    for name, row in rates.items()
    for lr in row
)
Path("base.toml").write_text(BASE)
Path("optimizers.toml").write_text(STUDY)
print(STUDY)

# %%
# !forge study optimizers.toml --dry-run

# %% [markdown]
# ## Run them
#
# One after another here; `--jobs 8` runs eight at a time, `--cluster FILE` submits them to SLURM. What was killed goes on when the
# same command is typed again.

# %%
# !forge study optimizers.toml --jobs 1 2>&1 | tail -4

# %% [markdown]
# ## The best learning rate of each

# %% alt: Validation loss by learning rate, on a logarithmic axis, a curve for each optimizer; each has a lowest point at a rate of its own.
import csv

from matplotlib import pyplot as plt

with open("runs/optimizers/results.csv") as file:
    rows = [row for row in csv.DictReader(file) if row["state"] == "complete"]
loss = {row["run"]: float(row["eval/loss"]) for row in rows}
figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
best = {}
for name, row in rates.items():
    losses = [loss[f"{name}-{lr:g}"] for lr in row]
    best[name] = min(zip(losses, row, strict=True))
    axes.plot(row, losses, marker="o", label=name)
    print(f"{name:6} best at {best[name][1]:g}: {best[name][0]:.3f} nats a byte")
axes.set(xscale="log", xlabel="learning rate", ylabel="validation loss (nats a byte)")
axes.legend()
plt.show()
assert len(loss) == 9 and all(lr == rates[name][1] for name, (_, lr) in best.items())  # none at an edge

# %% [markdown]
# ## Their curves

# %% alt: Training loss by step of the best run of each of the three optimizers.
from forge_trainer.report.series import read_metrics

figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
for name, (_, lr) in best.items():
    series = read_metrics(Path(f"runs/optimizers/{name}-{lr:g}/metrics.jsonl"))["loss"]
    axes.plot(series.steps, series.values, label=f"{name}, lr {lr:g}")
axes.set(xlabel="step", ylabel="training loss (nats a byte)")
axes.legend()
plt.show()

# %% [markdown]
# ## What the study says itself
#
# `--analyse` looks for the best rate by a parabola, and says what is not worth believing: here one seed, one size, and
# few steps. Treat the order of optimizers that are close to each other as unknown until seeds are added (`seed` in the
# grid).

# %%
# !forge study optimizers.toml --analyse

# %% [markdown]
# Next: [studies](../study.md), [optimizers](../optimizers.md).
