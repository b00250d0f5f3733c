"""Does a run on `shapes` look at its images? What it writes about right, blank and shuffled ones.

    uv run python benchmarks/vlm_controls.py runs/vlm_debug_moma [--samples 512]

Each held-out sample is asked as a prompt with files of images, by greedy writing: with its own images (which
equals `answers` of `forge eval`), with images of the colour of the background, and with those of another
sample that has as many. Chance is how often another sample with the same question has the same answer.
"""

import argparse
import io
import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from forge_data.loading.loader import build_loader
from forge_model.generation.generate import Sampling, generate
from forge_trainer.commands.evaluate import load_model
from forge_trainer.commands.generate import batch_inputs
from forge_trainer.config.job import Job
from forge_trainer.run_dir.files import read_job
from forge_vlm.images.marks import MARK
from msgspec.structs import replace
from PIL import Image

BACKGROUND, AT_ONCE, ROOM = 30, 32, 32
"""Of shapes; samples that are asked at once; tokens that an answer has at most."""


class Case(NamedTuple):
    """A question with a mark for each image, its images [n, S, S, 3] uint8, and the tokens of its answer."""

    question: str
    images: np.ndarray
    answer: list[int]


def cases(job: Job, samples: int) -> Iterator[Case]:
    """Held-out samples, made again of what training reads: patches become images, tokens text."""
    encoder, tokenizer = job.model.encoder, job.data.tokenizer.build()  # type: ignore[attr-defined]
    patch, side = encoder.patch_size, encoder.side
    data = replace(job.data, packing="pad", validation_samples=samples)
    for (micro,) in build_loader(data, "validation", micro_batch=1, items=job.model.items()):
        given = {name: value[0].tolist() for name, value in micro.inputs.items() if value.ndim == 2}
        cut = micro.inputs["patches"].numpy().reshape(-1, side, side, patch, patch, 3)
        images = cut.transpose(0, 1, 3, 2, 4, 5).reshape(-1, side * patch, side * patch, 3)
        labels, index = given["labels"], given["image_index"]
        first = next(at for at, label in enumerate(labels) if label >= 0)
        text = tokenizer.decode(
            [t for t, i in zip(given["tokens"][: first + 1], index, strict=False) if not i]
        )
        answer = [label for label in labels if label >= 0 and label != tokenizer.eos_id]
        yield Case(MARK * len(images) + text, images, answer)


def answered(job: Job, model: torch.nn.Module, asked: list[Case]) -> float:
    """The share of cases whose answer is what the model writes."""
    tokenizer, right = job.data.tokenizer.build(), 0
    for start in range(0, len(asked), AT_ONCE):
        some = asked[start : start + AT_ONCE]
        prompts = [job.model.prompt(c.question, [png(one) for one in c.images], tokenizer) for c in some]
        rows: list[list[int]] = [[] for _ in some]

        def keep(new: list[Any], rows: list[list[int]] = rows) -> tuple[int, ...]:
            for row, token in zip(rows, new, strict=True):
                row += [] if token in (None, tokenizer.eos_id) else [token]
            return ()

        inputs = batch_inputs(prompts, torch.device("cpu"))
        tokens, greedy = [prompt.tokens for prompt in prompts], Sampling(temperature=0.0)
        generate(model, tokens, ROOM, greedy, [tokenizer.eos_id], on_tokens=keep, inputs=inputs)
        right += sum(row == case.answer for row, case in zip(rows, some, strict=True))
    return right / len(asked)


def png(pixels: np.ndarray) -> bytes:
    """The file of an image."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


def shuffled(asked: list[Case], seed: int = 0) -> list[Case]:
    """The same questions, each with the images of another sample that has as many."""
    alike = defaultdict[int, list[int]](list)
    for number, case in enumerate(asked):
        alike[len(case.images)].append(number)
    found = list(asked)
    for numbers in alike.values():
        random.Random(seed).shuffle(numbers)
        for one, other in zip(numbers, numbers[1:] + numbers[:1], strict=True):
            found[one] = asked[one]._replace(images=asked[other].images)
    return found


def chance(asked: list[Case]) -> float:
    """Of how many samples another one with the same question has the same answer, on average."""
    answers = defaultdict[str, Counter[tuple[int, ...]]](Counter)
    for case in asked:
        answers[case.question][tuple(case.answer)] += 1
    pairs = (sum(n * (n - 1) for n in of.values()) / max(1, of.total() - 1) for of in answers.values())
    return sum(pairs) / len(asked)


def main() -> None:
    """Print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--samples", type=int, default=512)
    options = parser.parse_args()
    job = read_job(options.run)
    model, step = load_model(job)
    asked = list(cases(job, options.samples))
    blank = [case._replace(images=np.full_like(case.images, BACKGROUND)) for case in asked]
    found = {
        "run": options.run.name,
        "step": step,
        "samples": len(asked),
        "right": answered(job, model, asked),
        "blank": answered(job, model, blank),
        "shuffled": answered(job, model, shuffled(asked)),
        "chance": chance(asked),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
