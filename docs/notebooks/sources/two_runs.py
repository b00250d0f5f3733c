# %% [markdown]
# # Extract activations, and compare two runs by CKA
#
# The same model is trained twice, from different random weights and on the same text. No neuron of one has a counterpart in
# the other, yet their layers hold much the same. Centered kernel alignment (CKA, Kornblith et al. 2019,
# [arXiv:1905.00414](https://arxiv.org/abs/1905.00414)) compares which tokens two layers find alike, whatever the neurons.
#
# **You need:** two minutes of one CPU core. No GPU, no download.

# %% [markdown]
# ## Train twice

# %%
from pathlib import Path

RUN = """
[job]
name = "first"
seed = 1

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
steps = 250
global_batch = 16
micro_batch = 16
log_every_steps = 125

[optimizer]
type = "adamw"
lr = 6e-3

[schedule]
type = "cosine"
warmup_steps = 20

[eval]
every_steps = 250

[checkpoint]
every_steps = 250
"""
Path("first.toml").write_text(RUN)
# !forge train first.toml 2>&1 | cat
# !forge train first.toml --job.name=second --job.seed=2 2>&1 | tail -4

# %% [markdown]
# ## Extract
#
# Every layer of both runs, and of a model that was never trained, on the same text: a store on disk each, a row a token. A
# store of any size is written in bounded memory, and an extraction that was killed goes on.

# %%
import sysconfig

import torch
from forge_interp import compare_layers, extract_representations
from forge_interp.pictures import draw_layers, draw_similarity
from forge_model import initialize
from forge_trainer.commands.evaluate import load_model
from forge_trainer.run_dir.files import read_job

text = (Path(sysconfig.get_paths()["stdlib"]) / "argparse.py").read_bytes()[: 96 * 64]
tokens = torch.tensor(list(text)).view(96, 64)
models = {name: load_model(read_job(Path("runs") / name))[0] for name in ("first", "second")}
models["untrained"], _ = load_model(read_job(Path("runs/first")))
initialize(models["untrained"], seed=3)

sites = ["embed", "layers.*"]
stores = {
    name: extract_representations(model, tokens, sites, f"activations/{name}")
    for name, model in models.items()
}
store = stores["first"]
print(f"{len(store.token_id):,} rows of", {site: list(store[site].shape) for site in store.sites})
assert store.token_id.equal(stores["second"].token_id)

# %% [markdown]
# ## No neuron has a counterpart
#
# If neuron 5 of one run were neuron 5 of the other, they would be correlated.

# %%
a, b = (stores[name]["layers.2"].double() for name in ("first", "second"))
a, b = ((x - x.mean(0)) / x.std(0) for x in (a, b))
correlation = a.T @ b / len(a)
print(
    f"same number: |r| {correlation.diagonal().abs().mean():.2f}, any pair: |r| {correlation.abs().mean():.2f}"
)

# %% [markdown]
# ## But the layers agree


# %% alt: A table of CKA between all layers of the first and the second run: high on the diagonal, lower away from it.
def layers(name):
    return {site: stores[name][site] for site in store.sites}


between = compare_layers(layers("first"), layers("second"))
draw_similarity(between, rows="first run", columns="second run")

# %% alt: The same table between the first run and a model that was not trained: lower.
control = compare_layers(layers("first"), layers("untrained"))
draw_similarity(control, rows="first run", columns="untrained")

# %% alt: CKA by layer: between the two runs it is above that between a run and the untrained model in every layer.
names = [site.removesuffix(":out") for site in store.sites]
curves = {"two runs": between.values.diagonal(), "run and untrained": control.values.diagonal()}
figure = draw_layers(names, curves, unit="CKA of the same layer")
for site, same, chance in zip(names, *curves.values(), strict=True):
    print(f"{site:10} two runs {same:.2f}, run and untrained {chance:.2f}")
assert (curves["two runs"][1:] > curves["run and untrained"][1:]).all()
figure

# %% [markdown]
# ## Is it more than bytes that are alike?
#
# Both models see the same bytes, so some agreement comes for free. Take out what the byte itself says: subtract from each row
# the mean of all rows of that byte, and compare what is left, which only context can have put there.


# %%
def without_byte(x):
    """Rows less the mean row of their byte."""
    ids = store.token_id.long()
    sums = torch.zeros(260, x.shape[1]).double().index_add_(0, ids, x.double())
    counts = torch.bincount(ids, minlength=260).clamp_min(1)[:, None]
    return x.double() - (sums / counts)[ids]


context = {
    name: {site: without_byte(stores[name][site]) for site in store.sites if site.startswith("layers")}
    for name in stores
}
left = compare_layers(context["first"], context["second"]).values.diagonal()
chance = compare_layers(context["first"], context["untrained"]).values.diagonal()
for site, same, other in zip(context["first"], left, chance, strict=True):
    print(f"{site:12} two runs {same:.2f}, run and untrained {other:.2f}")
assert (left > chance).all()

# %% [markdown]
# Next: [compare models](../interp/compare_models.md), [extract](../interp/extract.md), [RSA against
# recordings](../interp/rsa.md).
