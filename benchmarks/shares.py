"""Where the time goes in the figures that miss their bar: shares of the operators of torch, by class.

Each side takes `--rounds` turns under torch's profiler, on one thread. Of what the quickest turn takes,
`matmul` and `attention` are the products that any code has to make, `memory` copies and fills, `other`
elementwise work, sorts and reductions, and `python` is in no operator at all. What FSDP2 costs is measured
by `parallel_overhead.py`.

Run alone on the machine: python benchmarks/shares.py [--rounds 5]
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import dense_step
import generate
import moe
import torch
from forge_trainer.profile.classes import class_of_operator
from report import table, write


def shares(turn: Callable[[], Any], rounds: int) -> dict[str, Any]:
    """Milliseconds of the quickest turn, per cent of it by class, and its longest operators."""
    turn()
    found: list[tuple[float, Any]] = []
    for _ in range(rounds):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            start = time.perf_counter()
            turn()
            took = 1e3 * (time.perf_counter() - start)
        found.append((took, profile.key_averages()))
    least, events = min(found, key=lambda one: one[0])
    classes: dict[str, float] = defaultdict(float)
    for event in events:
        classes[class_of_operator((event.key,))] += event.self_cpu_time_total / 1e3
    classes["python"] = max(0.0, least - sum(classes.values()))
    longest = sorted(events, key=lambda event: -event.self_cpu_time_total)[:6]
    return {
        "least ms": round(least, 2),
        **{kind: round(100 * ms / least, 1) for kind, ms in classes.items()},
        "longest": {event.key: round(100 * event.self_cpu_time_total / 1e3 / least, 1) for event in longest},
    }


def turns() -> dict[str, Callable[[], Any]]:
    """The sides of the figures, by name."""
    found: dict[str, Callable[[], Any]] = {}
    for case in (one for one in moe.CASES if one.num_experts == 64):
        made = moe.sides(case)
        found |= {f"{case.name}: {side}": made[side] for side in ("dense", "learned")}
    for shape, sizes in generate.SHAPES.items():
        models = generate.built(*sizes)
        for batch in (1, 8):
            both = generate.sides(*models, batch)
            for side in ("forge", "transformers"):
                found[f"{shape}, batch {batch}: {side}"] = lambda write_=both[side]: write_(generate.NEW)
    small = [one for one in dense_step.CASES if one.dtype == torch.bfloat16]
    for case in (dense_step.CASES[0], *small):
        steps = dense_step.training_steps(case, None)
        found |= {f"{case.name}: {side}": step for side, step in steps.items()}
    return found


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [{"side": name} | shares(turn, options.rounds) for name, turn in turns().items()]
    print(table([{key: value for key, value in row.items() if key != "longest"} for row in rows]))
    write("shares", {"threads": 1, "rounds": options.rounds, "rows": rows})


if __name__ == "__main__":
    main()
