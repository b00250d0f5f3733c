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
"""Keys in the store of the ranks: a rank was asked to stop; which rank failed first, and why; ranks gone."""

LINGER_S = 5.0
"""The longest that the rank that may serve the store waits at its end for the others to read it."""


class FailedElsewhere(Exception):
    """The error of a rank that fails only because another rank failed first.

    Attributes:
        code: the exit code of the rank that failed first.
    """

    def __init__(self, code: ExitCode, why: str) -> None:
        super().__init__(why)
        self.code = code


class EndTogether:
    """A context that begins before the process group is made and ends after the group is gone.

    A signal during the start raises `Stopped` at once on its rank, which drops its connections: every
    operation of other ranks with it fails. They read the reason in the store of the ranks, and end too.

    Args:
        signals: the signal handlers of this process.
        env: rank, world size and device of this process.
    """

    def __init__(self, signals: Signals, env: Env) -> None:
        self._signals, self._env = signals, env
        self._store: Store | None = None

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Enter this context inside of the process group.

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
            if self._signals.starting and self._is_stopped(self._store):
                self._leave(self._store)
                raise Stopped from error
            raise

    @contextmanager
    def telling(self, code: Callable[[BaseException], ExitCode]) -> Iterator[None]:
        """Tell the other ranks why this one fails before its connections drop; the innermost context.

        Args:
            code: gives the exit code for an error.

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
        """Return why the first rank failed; `mine` if the store is gone."""
        with suppress(RuntimeError):
            store.set_timeout(timedelta(seconds=LINGER_S))
            return store.compare_set(FAILED, "", mine).decode(errors="replace")
        return mine

    def _is_stopped(self, store: Store) -> bool:
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
        """Wait on the first rank, which may serve the store, until the others have read it.

        They read it once their connections to this rank fail. Connections of gloo live as long as anything
        refers to a group, and frames of the error do; so this method shuts the connections down itself.
        """
        if self._store is None or kind is None or not issubclass(kind, Exception | Stopped) or self._env.rank:
            return
        drop_connections(int(os.environ.get("MASTER_PORT", 0)))
        end = time.monotonic() + LINGER_S
        with suppress(RuntimeError):
            while self._store.add(GONE, 0) < self._env.world_size and time.monotonic() < end:
                time.sleep(0.02)


def drop_connections(but: int) -> None:
    """Shut down the TCP connections of this process, on Linux, except connections from or to port `but`."""
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
