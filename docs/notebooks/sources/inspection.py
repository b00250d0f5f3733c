# %% [markdown]
# # Look inside a model that you trained
#
# A byte-level language model learns the Python standard library, from random weights. Then it is opened: what its
# parts are called, what flows through them, at which layer a prediction is made, and what the attention heads do.
#
# **You need:** two minutes of one CPU core. No GPU, no download.

# %% [markdown]
# ## Train
#
# One TOML file says all of it. The text is the source code of the Python that runs this notebook. `2>&1 | cat` leaves out the
# bar that shows progress.

# %%
import math
from itertools import pairwise
from pathlib import Path

RUN = """
[job]
name = "reader"

[model]
vocab_size = 260          # 256 bytes, and four tokens that stand for no byte
max_tokens = 128
dim = 96
num_layers = 3
attention.num_heads = 4
ffn.dim = 256

[data]
max_tokens = 128
tokenizer.type = "bytes"

[[data.sources]]
type = "python-stdlib"
held_out = 0.02

[train]
steps = 300
global_batch = 16
micro_batch = 16
log_every_steps = 50

[optimizer]
type = "adamw"
lr = 4e-3

[schedule]
type = "cosine"
warmup_steps = 20

[eval]
every_steps = 300

[checkpoint]
every_steps = 300
"""
Path("reader.toml").write_text(RUN)
# !forge train reader.toml 2>&1 | cat

# %% [markdown]
# ## Open it
#
# `load_model` gives an ordinary `nn.Module`; everything below works for any other module as well.

# %%
import torch
from forge_interp import logit_lens, record
from forge_interp.pictures import draw_lens
from forge_trainer.commands.evaluate import load_model
from forge_trainer.run_dir.files import read_job
from matplotlib import pyplot as plt

job = read_job(Path("runs/reader"))
model, step = load_model(job)
parts = {
    "embedding": "embed", "attention": ".attention.", "feed-forward": ".ffn.", "norms": "norm", "head": "head",
}  # fmt: skip
for label, part in parts.items():
    count = sum(one.numel() for name, one in model.named_parameters() if part in name)
    print(f"{label:13} {count:>8,} parameters")
print(f"all           {sum(one.numel() for one in model.parameters()):>8,} parameters, at step {step}")

# %% [markdown]
# ## What flows through it
#
# `record` runs the model once and keeps the output of every module.

# %%
TEXT = "import os\n\ndef main(self, path):\n    return self.name\n\nclass Parser:\n    def __init__(self"
tokens = torch.tensor([list(TEXT.encode())])
recording = record(model, tokens, "**")
print(recording)

# %% [markdown]
# ## At which layer is the next byte known?
#
# The logit lens sends what each layer writes through the last norm and the head, as if the model ended there. The
# letter in a cell is the prediction, its colour how likely the byte is that really follows.

# %% alt: A table of layers by bytes of "import os, def main(self, path)": predictions of the last layer are likelier than those of the first, and most so inside words.
targets = torch.cat([tokens[:, 1:], torch.full((1, 1), -1)], dim=1)
result = logit_lens(model, ["embed", "layers.*"], tokens, targets=targets)
shown = 48
part = logit_lens(model, ["embed", "layers.*"], tokens[:, :shown], targets=targets[:, :shown])
draw_lens(part, list(TEXT[:shown]), decode=lambda token: chr(token) if 31 < token < 127 else "·")

# %% alt: Bars of the mean loss of the next byte after the embedding and after each layer; it falls from layer to layer.
losses = -result.target_log_prob[:, 0, :-1].mean(1)
figure, axes = plt.subplots(figsize=(5, 3), layout="constrained")
axes.bar([site.removesuffix(":out") for site in result.sites], losses)
axes.axhline(math.log(260), color="grey", linestyle="--", label="chance, ln 260")
axes.set(xlabel="read after", ylabel="loss of the next byte (nats)")
axes.legend()
plt.show()
print({site: round(loss, 2) for site, loss in zip(result.sites, losses.tolist(), strict=True)})
assert losses[-1] < 2.5 < losses[0]

# %% [markdown]
# ## What it is sure of
#
# The loss of each byte, as it is read: high at the start of a word, low inside of one.

# %% alt: A curve of the loss of each byte of a few lines of Python; it is high where a word begins and low within words.
each = -result.target_log_prob[-1, 0, :-1]
figure, axes = plt.subplots(figsize=(10, 2.8), layout="constrained")
axes.bar(range(1, len(TEXT)), each)
axes.set_xticks(range(len(TEXT)), [byte.replace("\n", "↵") for byte in TEXT], fontsize=7)
axes.set(xlabel="byte", ylabel="loss (nats)")
plt.show()
letters = torch.tensor([a.isalpha() and b.isalpha() for a, b in pairwise(TEXT)])
begins = torch.tensor([not a.isalpha() and b.isalpha() for a, b in pairwise(TEXT)])
print(f"first letter of a word: {each[begins].mean():.2f} nats, later ones: {each[letters].mean():.2f}")
assert each[begins].mean() > each[letters].mean()

# %% [markdown]
# ## What it writes

# %%
# !forge generate runs/reader --prompt "class " --temperature 0.7 --seed 1 --max-new-tokens 120 2>&1 | cat

# %% [markdown]
# Next: [capture](../interp/capture.md), [lenses](../interp/lenses.md), [what a run records while it
# trains](../interp/training.md).
