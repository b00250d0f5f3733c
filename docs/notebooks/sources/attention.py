# %% [markdown]
# # Attention pictures: induction heads emerge
#
# A model with two layers is trained until it can continue what it has seen before. It learns this in one sudden
# step, by two heads that work together: one attends to the token before, the other to the token that followed the
# last time (Olsson et al. 2022, [arXiv:2209.11895](https://arxiv.org/abs/2209.11895)). All of it happens here, from
# random weights.
#
# **You need:** two minutes of one CPU core. No GPU, no download.

# %% [markdown]
# ## A task that only copying solves
#
# Each sequence repeats a block of random tokens. Nothing predicts the tokens of the first block, so their loss
# stays at ln 64 = 4.16 nats or above. From then on every token is known to a model that looks back. The length of the block
# differs from row to row: with one length, a head could look a fixed distance back and would not have to read the
# tokens.

# %%
import math

import torch
from forge_interp import ablate, capture, edit
from forge_interp.pictures import attention_page, draw_attention
from forge_model import DecoderConfig, LossConfig, initialize
from forge_model.config import GroupedQueryConfig
from matplotlib import pyplot as plt

VOCAB, LENGTH, HEADS = 64, 48, 4
random = torch.Generator().manual_seed(0)


def draw(rows):
    """Tokens [rows, LENGTH] that repeat themselves, and after how many tokens each row does."""
    block = torch.randint(VOCAB, (rows, LENGTH), generator=random)
    period = torch.randint(8, 25, (rows, 1), generator=random)
    return block.gather(1, torch.arange(LENGTH) % period), period


tokens, period = draw(64)  # to look at; training draws others
repeated = torch.arange(LENGTH) >= period  # [64, LENGTH]
print(tokens[0].tolist())
print("the block has", period[0].item(), "tokens")

# %% [markdown]
# ## Two scores of a head
#
# - **previous token**: the mean weight on the token before.
# - **induction**: the mean weight on tokens that stand *after* an earlier place of the present token. With a block of `p`
#   tokens these are `p - 1`, `2p - 1`, ... tokens back.

# %%
sites = "layers.*.attention:attn.pattern"
back = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)  # how far back a key is from a query
after = ((back + 1) % period[:, None] == 0) & (back > 0)  # [64, queries, keys]


@torch.no_grad()
def look(model):
    """Loss of new and of repeated tokens in nats; both scores [layers, heads]; the patterns."""
    with capture(model, sites) as acts:
        losses = -model(tokens)[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    known = repeated[:, 1:]
    patterns = torch.stack([acts[site] for site in acts])  # [layers, rows, heads, queries, keys]
    previous = patterns.diagonal(-1, dim1=-2, dim2=-1).mean((1, -1))
    weight = (patterns * after[:, None]).sum(-1)
    induction = (weight * repeated[:, None]).sum((1, 3)) / repeated.sum()
    return losses[~known].mean().item(), losses[known].mean().item(), previous, induction, patterns


# %% [markdown]
# ## Train

# %%
config = DecoderConfig(
    vocab_size=VOCAB,
    dim=64,
    num_layers=2,
    max_tokens=LENGTH,
    attention=GroupedQueryConfig(num_heads=HEADS),
)
with torch.device("meta"):
    model = config.build()
model.to_empty(device="cpu")
initialize(model, seed=0)

STEPS, PEAK = 800, 3e-3
loss_fn = LossConfig().build()
optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, betas=(0.9, 0.98))
history = []
for step in range(STEPS + 1):
    if step % 25 == 0:
        history.append((step, *look(model)[:4]))
    batch, _ = draw(32)
    optimizer.param_groups[0]["lr"] = PEAK * min(1.0, (step + 1) / 50)
    terms = model(batch[:, :-1], labels=batch[:, 1:], loss_fn=loss_fn)
    (terms.total / terms.sums["loss"].count).backward()
    optimizer.step()
    optimizer.zero_grad()

new, known, previous, induction, patterns = look(model)
copier, helper = induction[1].argmax().item(), previous[0].argmax().item()
print(f"loss of new tokens {new:.2f} nats (ln {VOCAB} = {math.log(VOCAB):.2f}), of repeated ones {known:.2f}")
print(f"layer 1 head {copier}: induction {induction[1, copier]:.2f}")
print(f"layer 0 head {helper}: previous token {previous[0, helper]:.2f}; chance is {1 / 24:.2f}")
assert known < 1.5 < math.log(VOCAB) - 0.2 < new
assert induction[1, copier] > 0.35 and previous[0, helper] > 0.3

# %% [markdown]
# ## The moment it happens
#
# The loss of repeated tokens falls as the two scores rise, together: the second head can only find the token *after*
# an earlier occurrence because the first one has written into each token what came before it.

# %% alt: Above, loss by step: new tokens stay near 4.2 nats, repeated ones fall suddenly. Below, the scores of the best heads, which rise in the same steps.
steps, new_losses, known_losses, previous_scores, induction_scores = zip(*history, strict=True)
figure, (above, below) = plt.subplots(2, 1, figsize=(7, 5.5), sharex=True, layout="constrained")
above.plot(steps, new_losses, label="new tokens")
above.plot(steps, known_losses, label="repeated tokens")
above.axhline(math.log(VOCAB), color="grey", linestyle="--", label=f"ln {VOCAB}")
above.set(ylabel="loss (nats a token)")
for layer, style in enumerate(("--", "-")):
    for name, scores, colour in (
        ("previous token", previous_scores, "C2"),
        ("induction", induction_scores, "C3"),
    ):
        best = [score[layer].max() for score in scores]
        below.plot(steps, best, style, color=colour, label=f"{name}, best head of layer {layer}")
below.set(xlabel="step", ylabel="mean weight", ylim=(0, 1))
above.legend()
below.legend(fontsize=8)
plt.show()

# %% [markdown]
# ## What the heads look like
#
# One row of the test set, whose block is short. The diagonal next to the main one is the head of the previous token; the
# stripes `p - 1`, `2p - 1`, ... tokens back are induction.

# %% alt: Attention patterns of the four heads of layer 0, a map of queries by keys each; one has a stripe beside the diagonal.
row = period[:, 0].argmin().item()
words = [str(token) for token in tokens[row].tolist()]
draw_attention(patterns[0, row], words, title=f"layer 0 (head {helper}: the token before)", columns=2)

# %% alt: Attention patterns of the four heads of layer 1, a map of queries by keys each; one or more have a stripe one less than a block away from the diagonal.
draw_attention(patterns[1, row], words, title=f"layer 1 (head {copier}: induction)", columns=2)

# %% [markdown]
# The same as one page of HTML that needs no server and no network, to point at: choose row, site and head; a token
# shows what it attends to. It is a file that you can send to somebody.

# %%
from html import escape

from IPython.display import HTML

rows = [row, 0]
page = attention_page(
    {f"layer {layer}": patterns[layer, rows] for layer in range(2)},
    [[str(token) for token in tokens[one].tolist()] for one in rows],
    "attention.html",
    title="Two layers after training",
)
frame = f'<iframe title="Attention" style="width: 100%; height: 44rem" srcdoc="{escape(page.read_text())}">'
HTML(f"<div>{frame}</iframe></div>")

# %% [markdown]
# ## Is it these heads that do it?
#
# A pattern is no proof. Take each head out (its output becomes zero) and see what repeated tokens cost then.
# Where several heads do the same, one alone is not missed much; so take out together those whose score is above 0.15,
# in each layer, and, for comparison, the other heads of layer 0.


# %% alt: Bars: the loss of repeated tokens when each of the eight heads is taken out, and groups of them together: those of the previous token and those of induction cost most.
def without(layer, heads):
    """The loss of repeated tokens, in nats, while these heads give nothing."""
    with edit(model, {f"layers.{layer}.attention:attn.z": ablate("zero", (slice(None), heads))}):
        return look(model)[1]


costs = {f"{layer}.{head}": without(layer, [head]) for layer in range(2) for head in range(HEADS)}
helpers, copiers = ((score > 0.15).nonzero()[:, 0].tolist() for score in (previous[0], induction[1]))
others = [head for head in range(HEADS) if head not in helpers]
costs |= {
    "0: previous": without(0, helpers),
    "0: others": without(0, others),
    "1: induction": without(1, copiers),
}

figure, axes = plt.subplots(figsize=(8, 3), layout="constrained")
axes.bar(costs.keys(), costs.values())
axes.axhline(known, color="grey", linestyle="--", label="no head taken out")
axes.tick_params("x", rotation=30)
axes.set(xlabel="layer.head that is taken out", ylabel="loss of repeated tokens (nats)")
axes.legend()
plt.show()
print({name: round(cost, 2) for name, cost in costs.items()})
print("previous token, heads of layer 0:", [round(score, 2) for score in previous[0].tolist()])
print("induction, heads of layer 1:", [round(score, 2) for score in induction[1].tolist()])
assert costs[f"0.{helper}"] > known + 1
assert min(costs["0: previous"], costs["1: induction"]) > costs["0: others"] + 1

# %% [markdown]
# Next: [what can be asked of attention](../interp/attention.md), [patching](../interp/patching.md), and
# [the pictures](../interp/pictures.md).
