# %% [markdown]
# # A vision-language model, looked into
#
# A small model learns to answer questions about rendered shapes. Then: does it look at the image at all, where does it look, and
# which visual tokens carry the answer?
#
# **You need:** three minutes of one CPU core. No GPU, no download.

# %% [markdown]
# ## Train
#
# A vision transformer makes 16 visual tokens of an image of 32 x 32 pixels; a decoder reads them before the question.

# %%
from pathlib import Path

RUN = """
[job]
name = "seer"

[model]
type = "vision-language"

[model.decoder]
vocab_size = 257
max_tokens = 96
dim = 96
num_layers = 2
init_std = 0.08
attention.num_heads = 4

[model.encoder]
type = "vit"
image_size = 32
patch_size = 8
dim = 96
num_layers = 1
init_std = 0.08

[model.fusion]
type = "joint"

[data]
max_tokens = 95
mask_documents = true
tokenizer.type = "bytes"

[[data.sources]]
type = "shapes"
pairs = 0.0

[train]
steps = 500
global_batch = 16
micro_batch = 16
log_every_steps = 100

[optimizer]
type = "adamw"
lr = 2e-3

[schedule]
type = "cosine"
warmup_steps = 50

[step]
answers = true

[eval]
every_steps = 500

[checkpoint]
every_steps = 500
"""
Path("seer.toml").write_text(RUN)
# !forge train seer.toml 2>&1 | cat

# %% [markdown]
# ## Ask it
#
# Ninety-six images with a shape each: four colours, three kinds, two sizes, four places.

# %% alt: Four of the images: a small or large shape of some colour in one quarter of a dark square.
import io
from itertools import product

import numpy as np
import torch
from forge_interp import activation_patching, capture
from forge_trainer.commands.evaluate import load_model
from forge_trainer.commands.generate import batch_inputs
from forge_trainer.run_dir.files import read_job
from forge_vlm.sources.shapes import COLOURS, KINDS, SIZES, Scene, rendered
from matplotlib import pyplot as plt
from PIL import Image

job = read_job(Path("runs/seer"))
model, _ = load_model(job)
tokenizer = job.data.tokenizer.build()
scenes = [Scene(c, k, s, (q,)) for c, k, s, q in product(COLOURS, KINDS, SIZES, range(4))]
images = np.stack([rendered(scene, 32) for scene in scenes])


def inputs_of(question, images):
    """Tokens [rows, T] and the other inputs of the model, for one question about each image."""
    files = []
    for pixels in images:
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "png")
        files.append(file.getvalue())
    prompts = [job.model.prompt(question, [file], tokenizer) for file in files]
    return torch.tensor([prompt.tokens for prompt in prompts]), batch_inputs(prompts, torch.device("cpu"))


figure, axes = plt.subplots(1, 4, figsize=(8, 2.2), layout="constrained")
for place, number in zip(axes, (0, 29, 54, 95), strict=True):
    place.imshow(images[number])
    place.set(title=scenes[number].caption(), xticks=[], yticks=[])
plt.show()

# %% [markdown]
# ## Does it look at the image?
#
# The first letter of a colour, and of a kind of shape, tells which it is. Two controls: an empty image, and the image of another
# scene, whose answer counts as right only if it fits this one.


# %% alt: Bars: the share of right answers about colour and about shape; with the right image far above the empty and the exchanged one.
@torch.no_grad()
def right(question, images, answers):
    """The share of questions whose likeliest first letter is that of the answer."""
    tokens, inputs = inputs_of(question, images)
    said = model(tokens, **inputs)[:, -1].argmax(-1)
    return np.mean([chr(token) == answer[0] for token, answer in zip(said.tolist(), answers, strict=True)])


order = np.random.default_rng(0).permutation(len(scenes))
asked = {"colour? ": [scene.colour for scene in scenes], "shape? ": [scene.kind for scene in scenes]}
figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
scores = {}
for shift, (label, shown) in enumerate(
    {"its image": images, "an empty image": np.full_like(images, 30), "another image": images[order]}.items()
):
    scores[label] = [right(question, shown, answers) for question, answers in asked.items()]
    axes.bar(np.arange(2) + 0.27 * (shift - 1), scores[label], 0.27, label=label)
    print(
        f"{label:15}",
        {question: f"{score:.0%}" for question, score in zip(asked, scores[label], strict=True)},
    )
axes.set(xticks=range(2), xticklabels=list(asked), ylabel="share of right answers", ylim=(0, 1.05))
axes.legend()
plt.show()
assert scores["its image"][0] > 0.8 and scores["an empty image"][0] <= 0.3

# %% [markdown]
# ## Where does it look?
#
# The attention of the last token of "colour? " to the 16 visual tokens, for shapes in each of the four quarters, of the head that
# looks at the shape most. Chance is a quarter.

# %% alt: Four maps of 4 by 4 visual tokens, one for each quarter that the shape is in, and the weight that the last token gives them.
tokens, inputs = inputs_of("colour? ", images)
sites = "decoder.layers.*.attention:attn.pattern"
with torch.no_grad(), capture(model, sites) as acts:
    model(tokens, **inputs)
visual = (inputs["image_index"][0] > 0).nonzero()[:, 0]
patterns = torch.stack([acts[site][:, :, -1][..., visual] for site in acts])  # [layers, images, heads, 16]
quarter_of = torch.tensor([2 * (token // 8) + (token % 4) // 2 for token in range(16)])
here = quarter_of == torch.tensor([scene.quarters[0] for scene in scenes])[:, None]  # [images, 16]
share = (patterns * here[None, :, None]).sum(-1) / patterns.sum(-1)  # [layers, images, heads]
layer, head = divmod(share.mean(1).argmax().item(), share.shape[-1])
print("share of the weight on visual tokens that is on the quarter of the shape, each head of each layer:")
print(share.mean(1).numpy().round(2))

figure, axes = plt.subplots(1, 4, figsize=(9, 2.6), layout="constrained")
for quarter, place in enumerate(axes):
    rows = torch.tensor([scene.quarters[0] == quarter for scene in scenes])
    image = place.imshow(patterns[layer, rows, head].mean(0).view(4, 4), cmap="Greys", vmin=0)
    name = ("top left", "top right", "bottom left", "bottom right")[quarter]
    place.set(title=name, xticks=range(4), yticks=range(4), xlabel="visual token, column")
axes[0].set_ylabel("row")
figure.colorbar(image, ax=axes, label="weight")
figure.suptitle(f"layer {layer} head {head}")
plt.show()
assert share.mean(1).max() > 0.4

# %% [markdown]
# ## Which visual tokens carry the answer?
#
# Attention is no proof. Take an image of a red shape, put in one visual token after the other from the same shape in blue, and
# see how far the answer goes from "red" to "blue": 1 is all the way. A single token may change little where three others still say
# "red"; all four at the shape together are patched as well, and all twelve elsewhere.

# %% alt: Maps of 4 by 4 visual tokens for two places of the shape: patching tokens at the shape changes the answer most.
figure, axes = plt.subplots(1, 2, figsize=(6.5, 3), layout="constrained")
for place, quarter in zip(axes, (0, 3), strict=True):
    pair = [rendered(Scene(colour, "square", "large", (quarter,)), 32) for colour in ("blue", "red")]
    (blue, blue_inputs), (red, red_inputs) = (inputs_of("colour? ", [one]) for one in pair)
    table = activation_patching(
        model,
        {"tokens": blue, **blue_inputs},
        {"tokens": red, **red_inputs},
        ["connector"],
        lambda logits: logits[0, -1, ord("b")] - logits[0, -1, ord("r")],
        where={str(token): token for token in range(16)}
        | {"shape": quarter_of == quarter, "elsewhere": quarter_of != quarter},
    )
    effect = table.normalized[0, :16].reshape(4, 4)  # the connector gives [visual tokens, width]
    together, elsewhere = table.normalized[0, 16:]
    image = place.imshow(effect, cmap="RdBu_r", vmin=-1, vmax=1)
    place.set(
        title=f"shape at the {('top left', '', '', 'bottom right')[quarter]}",
        xticks=range(4),
        yticks=range(4),
    )
    place.set(xlabel="visual token, column", ylabel="row")
    print(f"all four tokens at the shape together {together:.2f}, the other twelve {elsewhere:.2f}")
    assert together > 0.8 > 0.2 > abs(elsewhere)
figure.colorbar(image, ax=axes, label="share of the answer brought back")
plt.show()

# %% [markdown]
# Next: [vision-language models](../vision.md), [patching](../interp/patching.md).
