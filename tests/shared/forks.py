"""Processes that start in milliseconds with everything imported, to be killed by tests.

A bare fork of the process that runs the tests would copy the locks of its threads without the threads (those
of OpenMP, for one), and its child would wait for them for ever. Here a real interpreter imports the file of a
function, computes nothing, and forks.
"""

import importlib.util
import multiprocessing
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any, ClassVar


class Forks:
    """Starts functions of test files in processes of their own; the fixture `forks` is one.

    Attributes:
        servers: ids of the interpreters that fork.
    """

    servers: ClassVar[set[int]] = set()

    def __init__(self) -> None:
        self._server: subprocess.Popen | None = None
        self._open()

    def start(self, function: Callable[..., Any], *arguments: Any) -> int:
        """Call a function in a new process.

        Args:
            function: at the top of a test file. Exit code 0 when it returns, 1 when it raises.
            arguments: must pickle, without classes and functions of a test file.

        Returns:
            The id of the process.
        """
        return self.start_in(function.__code__.co_filename, function.__name__, *arguments)

    def start_in(self, file: str, name: str, *arguments: Any) -> int:
        """As `start`, for a function that this process does not import."""
        return self._ask("start", file, name, arguments)

    def wait(self, pid: int) -> int:
        """The exit code of a process, once it has ended; -9 when it was killed."""
        return self._ask("wait", pid)

    def run(self, function: Callable[..., Any], *arguments: Any) -> int:
        """Start and wait."""
        return self.wait(self.start(function, *arguments))

    def _ask(self, *order: Any) -> int:
        if self._server is None:
            self._open()
        try:
            self._pipe.send(order)
            return self._pipe.recv()
        except BaseException:
            # Also when a test times out in here: the late answer must not reach the next one.
            self.close()
            raise

    def _open(self) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        command = [sys.executable, __file__, str(theirs.fileno())]
        self._server = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        self.servers.add(self._server.pid)
        theirs.close()

    def close(self) -> None:
        """End the server; processes that still run are those that a test forgot."""
        if self._server:
            self._pipe.close()
            self._server.kill()
            self._server.wait()
            self.servers.remove(self._server.pid)
        self._server = None


def serve(pipe: Connection) -> None:
    """Do what is asked until the other side is gone."""
    files: dict[str, ModuleType] = {}
    while True:
        try:
            order, *rest = pipe.recv()
        except EOFError:
            return
        if order == "wait":
            pipe.send(os.waitstatus_to_exitcode(os.waitpid(rest[0], 0)[1]))
            continue
        path, name, arguments = rest
        if path not in files:
            files[path] = load(path)
        pid = os.fork()
        if pid == 0:
            pipe.close()
            call(getattr(files[path], name), arguments)
        pipe.send(pid)


def call(function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Call it and end this process."""
    try:
        function(*arguments)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def load(path: str) -> ModuleType:
    """Import a file that has no name to import it by."""
    spec = importlib.util.spec_from_file_location(f"forks_{abs(hash(path))}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
