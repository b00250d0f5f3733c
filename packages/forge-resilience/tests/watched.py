"""A rank that hangs after some steps, in a way that is asked for: watched.py FOLDER RANK RANKS HOW"""

import ctypes
import sys
import time
from pathlib import Path

from forge_resilience.watchdog import Watchdog


def wait_for_others() -> None:
    """What a collective does while another rank does not come."""
    time.sleep(60)


def main(folder: Path, rank: int, ranks: int, how: str) -> None:
    """Three steps; then rank 1 does something else, and the others wait for it."""
    ended = lambda found: (folder.parent / f"ended-{rank}").write_text(found.why)  # noqa: E731
    mutex = ctypes.create_string_buffer(64)
    least_s, first_s = 3.0 if how == "gil" else 1.5, 600.0 if how == "early" else 6.0
    with Watchdog(folder, rank, ranks, least_s, first_s, lambda: b"[]", ended) as dog:
        (folder.parent / f"beat-{rank}").write_text(dog._file.path)
        for step in range(4):
            for phase in ("data", "step"):
                dog.enter(phase)
                if how == "early":
                    time.sleep(60)
                if step == 3 and how == "all" and phase == "step":
                    wait_for_others()
                if step == 3 and how == "data" and rank == 1:
                    time.sleep(60)
                if step == 3 and how == "gil" and rank == 1 and phase == "step":
                    for _ in range(2):  # the second time never ends, and no signal interrupts it
                        ctypes.PyDLL(None).pthread_mutex_lock(mutex)
                if step == 3 and how == "first" and rank == 1:
                    dog.enter("never seen")
                    time.sleep(60)
                if step == 3 and phase == "step" and how != "none":
                    print("waits", flush=True)
                    wait_for_others()
                time.sleep(0.05)
                dog.learn(phase, 0.05)
        print("waits", flush=True)
        time.sleep(0.2)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
