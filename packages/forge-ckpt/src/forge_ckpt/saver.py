"""Checkpoints written while training waits, or beside training. A failed save does not fail the run."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from forge_ckpt.error import CheckpointError
from forge_ckpt.manifest import Snapshot, copied
from forge_ckpt.memory import free_memory_bytes
from forge_ckpt.state import TrainState
from forge_ckpt.store import Store

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

MAX_FAILURES = 3
"""So many saves in a row may not fail."""

RESERVE = 1.2
"""So many times what a copy takes must be free, or there is none."""


class Saver:
    """Saves the state of a run, one save at a time. Used by all ranks of the store in the same order.

    Beside training (`asynchronous`), training waits only until the state is copied to host memory. A thread
    writes the copy: it continues when the process is signalled, and ends with the process. So call `finish`
    at the end.

    Args:
        store: a store whose group is used by nothing else.
        state: the state to save.
        asynchronous: write beside training, if host memory suffices.
        observe: called with the seconds of each asynchronous save.
    """

    def __init__(
        self,
        store: Store,
        state: TrainState,
        asynchronous: bool = False,
        observe: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self.saved_step: int | None = None
        self.failures = 0
        self._store, self._state, self._observe = store, state, observe
        self._asynchronous = asynchronous
        self._is_reported = self._unjudged = False
        self._ranks_here: int | None = None
        self._step = -1
        self._buffers: dict[str, Tensor] = {}
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self._seconds = 0.0
        self._thread: threading.Thread | None = None

    def save(self, step: int, meta: Mapping[str, Any], values: Mapping[str, Any] | None = None) -> None:
        """Save the state as it is now. Collective.

        Waits until the save before is published. Does not wait for this one if it is asynchronous.

        Args:
            step: optimizer steps taken.
            meta: other data of this moment, as JSON.
            values: other values of this rank, as JSON by names of at least three parts; the values of all
                ranks are merged.

        Raises:
            CheckpointError: this is the third save in a row that failed.
        """
        self.finish()
        start = time.monotonic()
        snapshot = self._captured(meta, values or {})
        self._step = step
        if self._asynchronous and self._ranks_here is None:
            with suppress(RuntimeError):  # a rank has died: the save says so
                self._ranks_here = self._store.ranks_on_this_machine()
        if isinstance(snapshot, CheckpointError) or not self._begin_beside(step, snapshot, start):
            self._write(step, snapshot, start)
            # ranks that write beside training hear of a failure as they finish: a run ends on all at once
            self._unjudged = self._asynchronous and self._error is not None
            if not self._unjudged:
                self._judge()

    def _captured(self, meta: Mapping[str, Any], values: Mapping[str, Any]) -> Snapshot | CheckpointError:
        """Return the state, or why it cannot be saved, which fails the save on all ranks."""
        try:
            if short := [name for name in values if str(name).count(".") < 2]:
                raise CheckpointError(f"a value is named {short[0]!r}; expected three parts or more, a.b.c")
            snapshot = self._state.capture(meta, copy=False)
            return replace(snapshot, values={**snapshot.values, **copied(values)})
        except CheckpointError as error:
            return error
        except Exception as error:  # the other ranks must hear of it, not wait for this one
            return CheckpointError(f"{type(error).__name__}: {error}")

    def _begin_beside(self, step: int, snapshot: Snapshot, start: float) -> bool:
        """Begin to write a copy beside training; returns whether that is wanted, and there is memory for it.

        Each rank decides alone: the collectives are the same in both cases.
        """
        try:
            if not self._fits(snapshot.tensors):
                return False
            copy = self._store.copied_to_host(snapshot, self._buffers)
            self._ended.clear()
            thread = threading.Thread(
                target=self._write, args=(step, copy, start), name="checkpoint", daemon=True
            )
            thread.start()
        except (MemoryError, RuntimeError) as error:
            self._report_once(f"the state could not be copied: {str(error).partition(chr(10))[0]}")
            return False
        except ValueError:  # something cannot be saved: the save says so, on all ranks
            return False
        self._thread = thread
        return True

    def _report_once(self, reason: str) -> None:
        if not self._is_reported:
            self._is_reported = True
            log.warning("training waits for checkpoints: %s", reason)

    def finish(self) -> None:
        """Wait until the save in flight, if there is one, is published or has failed. Collective.

        Raises:
            CheckpointError: three saves in a row have failed.
        """
        if self._thread is not None:
            self._ended.wait()  # not join: what interrupts that leaves a thread that seems to have ended
            self._thread = None
            self._observe(self._seconds)
            self._judge()
        elif self._unjudged:
            self._unjudged = False
            self._judge()

    def close(self, timeout_s: float = 120.0) -> None:
        """Wait for the save in flight as the process ends, whatever happened; raises nothing."""
        if self._thread is None:
            return
        if not self._ended.wait(timeout_s):
            log.warning("the save of step %d is given up: it did not end in %.0f s", self._step, timeout_s)
            return
        self._thread = None
        if self._error is not None:
            log.warning("%s", self._error)
        else:
            self.saved_step = self._step

    def _write(self, step: int, snapshot: Any, start: float) -> None:
        try:
            self._store.save(step, snapshot)
            self._error = None
        except Exception as error:  # in a thread there is nobody above
            self._error = error
        finally:
            self._seconds = time.monotonic() - start
            self._ended.set()

    def _judge(self) -> None:
        if self._error is None:
            self.saved_step, self.failures = self._step, 0
            return
        self.failures += 1
        if self._store.first:
            log.warning("%s (%d of %d failures in a row)", self._error, self.failures, MAX_FAILURES)
        if self.failures >= MAX_FAILURES:
            raise CheckpointError(
                f"{self.failures} saves in a row have failed; the last: {self._error}. The newest checkpoint "
                f"of this start is {self.saved_step if self.saved_step is not None else 'none'}"
            )

    def _fits(self, tensors: Mapping[str, Any]) -> bool:
        """Whether to write beside training."""
        if not self._asynchronous:
            return False
        needed, free = RESERVE * self._store.staging_bytes(tensors, self._buffers), free_memory_bytes()
        needed *= self._ranks_here or 1  # which all take their copies now
        if free is None or needed <= free:
            return True
        self._report_once(
            f"a copy of the state takes {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"
        )
        return False
