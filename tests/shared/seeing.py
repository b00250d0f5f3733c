"""A tiny vision-language run, its fusions and layouts, and images to ask it about."""

import io

JOB = """
[job]
name = "tiny"
root = "{root}"

[model]
type = "vision-language"
decoder = {{ vocab_size = 272, max_tokens = 96, dim = 32, num_layers = 2, attention = {{ num_heads = 2 }} }}
encoder = {{ image_size = 16, patch_size = 8, dim = 16, num_heads = 2 }}
fusion = {fusion}

[data]
max_tokens = 96
mask_documents = true
cache_dir = "{cache}"

[[data.sources]]
type = "shapes"
samples = 400
held_out = 24

[train]
steps = {steps}
global_batch = 8
micro_batch = 2
log_every_steps = 1

[optimizer]
type = "adamw"
lr = 1e-2
eps = 1e-5

[schedule]
type = "cosine"
warmup_steps = 2

[step]
answers = true

[eval]
every_steps = 4

[checkpoint]
every_steps = 3
"""


FUSIONS = {
    "joint": "{}",
    "spans": '{ attention = "image" }',
    "cross-attention": '{ type = "cross-attention", layers = ":", max_visual_tokens = 32, gate_init = 0.5 }',
    "mixture-of-transformers": '{ type = "mixture-of-transformers" }',
    "moma": '{ type = "moma", experts = { text = 2, image = 2 } }',
    "moma-threshold": '{ type = "moma", routing = "threshold" }',
}


def write_job(path, root, cache, steps=8, fusion="joint"):
    """Write such a job to a file."""
    path.write_text(JOB.format(steps=steps, root=root, cache=cache, fusion=FUSIONS[fusion]))
    return path


def image(colour, folder):
    """The file of an image of one large square."""
    from forge_vlm.sources.shapes import Scene, rendered
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(rendered(Scene(colour, "square", "large", (0,)), 16)).save(file, "png")
    (folder / f"{colour}.png").write_bytes(file.getvalue())
    return folder / f"{colour}.png"


LAYOUTS = {
    "fsdp2": (),
    "tp2": ("--mesh.tp=2", "--tensor_parallel.sequence=false"),
    "tp2-sequence": ("--mesh.tp=2",),
    "pp2": ("--mesh.pp=2",),
    "ep2": ("--mesh.ep=2",),
    "cp2": ("--mesh.cp=2", "--context_parallel.method=ulysses"),
}
ALL_LAYOUTS = {
    "one": (1, ()),
    "fsdp2": (2, ()),
    "tp2": (2, LAYOUTS["tp2"]),
    "pp2": (2, LAYOUTS["pp2"]),
}
"""Ranks and options."""
