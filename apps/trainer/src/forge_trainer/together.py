"""A start that is asked to stop on one rank stops on all of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from forge_parallel.env import Env
from forge_resilience.signals import Signals, Stopped

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

STOPPED, GONE = "forge/stopped", "forge/gone"
"""Keys in the store of the ranks: one was asked to stop; how many have left since."""

LINGER_S = 5.0
"""So long the rank that may hold the store stays for the others to read it."""


class StopTogether:
    """A context to be entered before the process group is made, and left after it is gone.

    A signal during the start raises `Stopped` at once on its rank, which drops its connections: the others
    fail in whatever they do with it. They read in the store of the ranks why it left, and end as it did.

    Args:
        signals: of this process.
        env: its place.
    """

    def __init__(self, signals: Signals, env: Env) -> None:
        self._signals, self._env = signals, env
        self._store: Store | None = None

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Inside of the process group.

        Raises:
            Stopped: another rank was asked to stop during the start.
        """
        if self._env.world_size == 1:
            yield
            return
        from torch.distributed import distributed_c10d

        self._store = distributed_c10d._get_default_store()  # torch has no public name for it
        try:
            yield
        except Stopped:
            self._leave(self._store)
            raise
        except Exception as error:
            if self._signals.starting and self._is_told(self._store):
                self._leave(self._store)
                raise Stopped from error
            raise

    def _is_told(self, store: Store) -> bool:
        with suppress(RuntimeError):  # it may be gone
            store.set_timeout(timedelta(seconds=LINGER_S))
            return store.check([STOPPED])
        return False

    def _leave(self, store: Store) -> None:
        with suppress(RuntimeError):
            store.set(STOPPED, "1")
            store.add(GONE, 1)

    def __enter__(self) -> StopTogether:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """The first rank, which may hold the store, stays until the others have read it."""
        if self._store is None or kind is None or not issubclass(kind, Stopped) or self._env.rank > 0:
            return
        end = time.monotonic() + LINGER_S
        with suppress(RuntimeError):
            while self._store.add(GONE, 0) < self._env.world_size and time.monotonic() < end:
                time.sleep(0.02)
