# %% [markdown]
# # Expert routing: experts that specialise
#
# A mixture of experts reads two languages that are written with the same letters, and nobody tells it which is which. Do
# its routers find out, and send the same letter to other experts in the one than in the other? And is the choice of use: what does it
# cost to exchange it?
#
# **You need:** two minutes of one CPU core. No GPU, no download.

# %% [markdown]
# ## Two languages, the same letters
#
# In each language every letter is followed by one of two letters, either as likely as the other; which two is drawn at random, and differs
# between the languages. All letters are equally frequent in both. A single letter therefore says nothing about the language, two neighbours mostly do. No model can have a loss below
# ln 2 = 0.69 nats a letter; one that mixes the languages up needs about ln 4 = 1.39.

# %%
import json
import math
from pathlib import Path

import numpy as np

LETTERS = np.frombuffer(b"abcdefghijklmnop", dtype=np.uint8)
random = np.random.default_rng(0)


def draw_language():
    """[16, 2] which letters may follow each; every letter has two followers, and follows two."""
    one, other = random.permutation(16), random.permutation(16)
    while (one == other).any():
        other = random.permutation(16)
    return np.stack([one, other], axis=1)


followers = {"first": draw_language(), "second": draw_language()}


def write(language, rows, length=65):
    """[rows, length] bytes of a language."""
    states = [random.integers(16, size=rows)]
    for _ in range(length - 1):
        states.append(followers[language][states[-1], random.integers(2, size=rows)])
    return LETTERS[np.stack(states, 1)]


for language in followers:
    texts = [row.tobytes().decode() for row in write(language, 6000)]
    Path(f"{language}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    print(language, texts[0])

# %% [markdown]
# ## Train
#
# Eight experts in each layer, of which a letter uses two. A bias that follows the load keeps them all busy, as in
# DeepSeek-V3; no loss asks for specialisation.

# %%
RUN = """
[job]
name = "experts"

[model]
vocab_size = 260
max_tokens = 64
dim = 48
num_layers = 3
attention.num_heads = 4

[model.ffn]
type = "moe"
num_experts = 8
top_k = 2
dim = 32

[model.ffn.router]
type = "sigmoid"
bias_rate = 2e-3

[data]
max_tokens = 64
mask_documents = true
tokenizer.type = "bytes"

[[data.sources]]
type = "files"
name = "first"
paths = ["first.jsonl"]
weight = 0.5

[[data.sources]]
type = "files"
name = "second"
paths = ["second.jsonl"]
weight = 0.5

[train]
steps = 500
global_batch = 16
micro_batch = 16
log_every_steps = 10

[optimizer]
type = "adamw"
lr = 6e-3

[schedule]
type = "cosine"
warmup_steps = 20

[eval]
every_steps = 0

[checkpoint]
every_steps = 500

[hooks.load]
type = "expert-load"
every_steps = 10
"""
Path("experts.toml").write_text(RUN)
# !forge train experts.toml 2>&1 | grep -v -E "step +[0-9]*[1-9]0/"

# %% [markdown]
# ## Is the load even?
#
# The hook `expert-load` wrote how many bytes each expert served.

# %% alt: Three panels, one a layer: the share of each of eight experts by step, near one eighth for all of them at the end.
import torch
from matplotlib import pyplot as plt

records = [json.loads(line) for line in Path("runs/experts/experts.jsonl").read_text().splitlines()]
layers = [name for name in records[0] if name.startswith("layers.")]
steps = [record["step"] for record in records]
figure, axes = plt.subplots(1, 3, figsize=(10, 3), sharey=True, layout="constrained")
for place, layer in zip(axes, layers, strict=True):
    load = torch.tensor([record[layer] for record in records], dtype=torch.float64)
    share = load / load.sum(1, keepdim=True)
    place.plot(steps, share)
    place.axhline(1 / 8, color="black", linestyle="--")
    place.set(title=layer, xlabel="step")
    print(f"{layer}: busiest expert at the end {share[-1].max() * 8:.2f} times the mean")
axes[0].set(ylabel="share of the bytes", ylim=(0, None))
plt.show()

# %% [markdown]
# ## Who serves which language?
#
# New text of each language, and a look at which experts the routers choose.

# %%
from forge_model import initialize
from forge_trainer.commands.evaluate import load_model
from forge_trainer.run_dir.files import read_job

model, _ = load_model(read_job(Path("runs/experts")))
first, second = (torch.from_numpy(write(language, 128).astype(np.int64))[:, :64] for language in followers)


def choices(model, tokens):
    """[layers, rows, bytes, experts]: 1/2 for each of the two experts that serve a byte."""
    found = []

    def note(router, inputs, routed):
        chosen = torch.nn.functional.one_hot(routed.routing.experts, 8).view(*tokens.shape, -1, 8)
        found.append(chosen.double().mean(2))

    hooks = [module.ffn.router.register_forward_hook(note) for module in model.layers.values()]
    with torch.no_grad():
        model(tokens)
    for hook in hooks:
        hook.remove()
    return torch.stack(found)


# %% alt: For each layer, bars of the share of each expert for the first and for the second language; many serve mostly one of them.
tokens = torch.cat([first, second])
is_first = torch.arange(len(tokens)) < len(first)
chosen = choices(model, tokens)
shares = chosen[:, is_first].mean((1, 2)), chosen[:, ~is_first].mean((1, 2))
figure, axes = plt.subplots(1, 3, figsize=(10, 3), sharey=True, layout="constrained")
for layer, place in enumerate(axes):
    for shift, (label, share) in enumerate(zip(("first", "second"), shares, strict=True)):
        place.bar(torch.arange(8) + 0.4 * shift - 0.2, share[layer], 0.4, label=label)
    place.axhline(1 / 8, color="black", linestyle="--", linewidth=0.8)
    place.set(title=f"layer {layer}", xlabel="expert")
axes[0].set(ylabel="share of the choices")
axes[0].legend()
plt.show()

# %% [markdown]
# ## At the same letter
#
# The load of each expert is even, so that an expert has little choice but to serve both languages: some letters of the one, and
# others of the other. So compare at the same letter: how differently is the `e` of one language served from the `e` of the other?
# Two controls: the same weights before training, and texts labelled at random.

# %% alt: Bars by layer: how differently the languages are served. Overall, an untrained model does it as much; at the same letter, only the trained one is clearly above labels at random.
one_hot = torch.nn.functional.one_hot(tokens, 260).double()  # [rows, bytes, 260]


def apart(chosen, labels):
    """[layers]: half the sum over experts of |share in the first - share in the second|; 0 is alike, 1 is disjoint."""
    return (chosen[:, labels].mean((1, 2)) - chosen[:, ~labels].mean((1, 2))).abs().sum(-1) / 2


def apart_at_the_same_letter(chosen, labels):
    """[layers]: the same for each byte alone; the mean over bytes, by how often they are in both."""
    sums = [torch.einsum("rtv,lrte->lve", one_hot[who], chosen[:, who]) for who in (labels, ~labels)]
    counts = [one_hot[who].sum((0, 1)) for who in (labels, ~labels)]
    rates = [x / count.clamp_min(1)[None, :, None] for x, count in zip(sums, counts, strict=True)]
    weight = torch.minimum(*counts)
    return ((rates[0] - rates[1]).abs().sum(-1) / 2 * weight).sum(1) / weight.sum()


untrained, _ = load_model(read_job(Path("runs/experts")))
initialize(untrained, seed=1)
chosen_before = choices(untrained, tokens)
shuffle = torch.Generator().manual_seed(0)
orders = [is_first[torch.randperm(len(tokens), generator=shuffle)] for _ in range(20)]

figure, axes = plt.subplots(1, 2, figsize=(10, 3.2), sharey=True, layout="constrained")
results = {}
for place, (title, measure) in zip(
    axes, {"all letters": apart, "at the same letter": apart_at_the_same_letter}.items(), strict=True
):
    rows = {
        "trained": measure(chosen, is_first),
        "untrained": measure(chosen_before, is_first),
        "trained, labels at random": torch.stack([measure(chosen, order) for order in orders]).amax(0),
    }
    for shift, (label, values) in enumerate(rows.items()):
        place.bar(torch.arange(3) + 0.27 * (shift - 1), values, 0.27, label=label)
        print(f"{title:17} {label:26}", "  ".join(f"{value:.2f}" for value in values.tolist()))
    place.set(title=title, xlabel="layer", xticks=range(3))
    results[title] = list(rows.values())
axes[0].set(ylabel="languages served apart (0 to 1)")
axes[1].legend()
plt.show()
trained, before, chance = results["at the same letter"]
assert (trained[1:] > 1.5 * chance[1:]).all() and (trained[1:] > 1.5 * before[1:]).all()

# %% [markdown]
# ## Letter by letter
#
# Which experts of the last layer serve each letter: the same letter goes to other experts in the other language.

# %% alt: Two maps of experts by letters, one for each language; in a column, the dark cells of the two are mostly in different rows.
figure, axes = plt.subplots(1, 2, figsize=(10, 3.2), sharey=True, layout="constrained")
letters = torch.from_numpy(LETTERS.astype(np.int64))
for place, (language, who) in zip(axes, {"first": is_first, "second": ~is_first}.items(), strict=True):
    served = torch.stack([2 * chosen[-1][who][tokens[who] == letter].mean(0) for letter in letters], dim=1)
    image = place.imshow(served, cmap="Greys", vmin=0, vmax=1, aspect="auto")
    place.set(title=f"{language} language", xlabel="letter", xticks=range(16), yticks=range(8))
    place.set_xticklabels([chr(letter) for letter in LETTERS])
axes[0].set(ylabel="expert of layer 2")
figure.colorbar(image, ax=axes, label="share of the letter's\noccurrences it serves")
plt.show()

# %% [markdown]
# ## Is the choice of use?
#
# Make every letter be served as the same letter was elsewhere: by the experts, with the weights, that the router chose for another
# occurrence. Where that one is of the same language, little should change. Where it is of the other language, the letter is served by
# experts of the wrong one, and if they know their language, the loss must rise.

# %% alt: Bars of the loss: as it is, served as in the same language, and served as in the other language, which is far higher.
inputs, targets = tokens[:, :-1], tokens[:, 1:]
flat, of_first = inputs.flatten(), is_first[:, None].expand(inputs.shape).flatten()
context = (torch.arange(inputs.shape[1]) >= 2).expand(inputs.shape).flatten()  # the language can be known


def donors(same_language):
    """For each letter of the inputs, another place of the same letter."""
    found = torch.zeros(len(flat), dtype=torch.int64)
    for letter in letters:
        for language in (True, False):
            receive = ((flat == letter) & (of_first == language)).nonzero()[:, 0]
            give = ((flat == letter) & (of_first == (language == same_language)) & context).nonzero()[:, 0]
            found[receive] = give[torch.from_numpy(random.integers(len(give), size=len(receive)))]
    return found


@torch.no_grad()
def loss(donor=None):
    """Nats a letter where the language can be known; with the choices that routers made at the donors."""

    def exchange(router, args, routed):
        routing = routed.routing
        experts, weights = (
            x.view(len(flat), -1)[donor].flatten() for x in (routing.experts, routing.weights)
        )
        return routed._replace(routing=routing._replace(experts=experts, weights=weights))

    layers = model.layers.values() if donor is not None else ()
    hooks = [layer.ffn.router.register_forward_hook(exchange) for layer in layers]
    logits = model(inputs).flatten(0, 1)
    for hook in hooks:
        hook.remove()
    return torch.nn.functional.cross_entropy(logits[context], targets.flatten()[context]).item()


losses = {
    "as it is": loss(),
    "served as in\nthe same language": loss(donors(same_language=True)),
    "served as in\nthe other language": loss(donors(same_language=False)),
}
figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
axes.bar(losses.keys(), losses.values())
axes.axhline(math.log(2), color="grey", linestyle="--", label="ln 2: no model can do better")
axes.set(ylabel="loss (nats a letter)")
axes.legend()
plt.show()
print({label.replace("\n", " "): round(value, 2) for label, value in losses.items()})
kept, same, other = losses.values()
assert kept < 0.8 and other - kept > 3 * max(same - kept, 0.05)

# %% [markdown]
# Next: [choose a router](../experts.md).
