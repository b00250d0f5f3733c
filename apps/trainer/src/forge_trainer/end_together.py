"""Ends all ranks when one ends, for the same reason."""

from __future__ import annotations

import os
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from forge_parallel.env import Env
from forge_resilience.exit_codes import ExitCode
from forge_resilience.signals import Signals, Stopped

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

STOPPED, FAILED, GONE = "forge/stopped", "forge/failed", "forge/gone"
"""Keys in the store of the ranks: one was asked to stop; who failed first, and why; how many left."""

LINGER_S = 5.0
"""So long the rank that may hold the store stays for the others to read it."""


class FailedElsewhere(Exception):
    """Another rank failed first, and this one only because of it.

    Attributes:
        code: with which that one ends.
    """

    def __init__(self, code: ExitCode, why: str) -> None:
        super().__init__(why)
        self.code = code


class EndTogether:
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

    @contextmanager
    def telling(self, code: Callable[[BaseException], ExitCode]) -> Iterator[None]:
        """Innermost: a rank that fails tells the others why before its connections drop.

        Args:
            code: with which a rank ends that has this error.

        Raises:
            FailedElsewhere: another rank had failed when this one did.
        """
        try:
            yield
        except Exception as error:
            if (store := self._store) is None:
                raise
            mine = f"{int(code(error))} rank {self._env.rank}: {type(error).__name__}: {error}"
            mine = mine.encode(errors="replace").decode()  # a store takes no name that is no text
            first = self._first(store, mine)
            with suppress(RuntimeError):
                store.add(GONE, 1)
            if first == mine:
                raise
            number, _, why = first.partition(" ")
            raise FailedElsewhere(ExitCode(int(number)), why) from error

    def _first(self, store: Store, mine: str) -> str:
        """Why the first rank failed that did; this one, where the store is gone."""
        with suppress(RuntimeError):
            store.set_timeout(timedelta(seconds=LINGER_S))
            return store.compare_set(FAILED, "", mine).decode(errors="replace")
        return mine

    def _is_told(self, store: Store) -> bool:
        with suppress(RuntimeError):  # it may be gone
            store.set_timeout(timedelta(seconds=LINGER_S))
            return store.check([STOPPED])
        return False

    def _leave(self, store: Store) -> None:
        with suppress(RuntimeError):
            store.set(STOPPED, "1")
            store.add(GONE, 1)

    def __enter__(self) -> EndTogether:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """The first rank, which may hold the store, stays until the others have read it.

        They read it once their connections to this rank fail. Those of gloo live as long as anything refers
        to a group, which frames of the error do: they are dropped by hand.
        """
        if self._store is None or kind is None or not issubclass(kind, Exception | Stopped) or self._env.rank:
            return
        drop_connections(int(os.environ.get("MASTER_PORT", 0)))
        end = time.monotonic() + LINGER_S
        with suppress(RuntimeError):
            while self._store.add(GONE, 0) < self._env.world_size and time.monotonic() < end:
                time.sleep(0.02)


def drop_connections(but: int) -> None:
    """Shut down the TCP connections of this process, on Linux, except those from or to one port."""
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    _shut_down(connection, but)


def _shut_down(connection: socket.socket, but: int) -> None:
    if connection.family in (socket.AF_INET, socket.AF_INET6):
        ports = connection.getsockname()[1], connection.getpeername()[1]
        if but not in ports:
            connection.shutdown(socket.SHUT_RDWR)
