"""How files of the hub are opened, and retried when the hub does not answer. Imports no torch."""

from __future__ import annotations

import gzip
import io
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, TypeVar, cast

from forge_data.error import DataError

PATIENCE_S = 180.0
"""So long a read is tried again; less than what a watchdog takes for a hang."""

FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 30.0

TIMEOUT_S = 20.0
"""A connection that says nothing for so long is given up."""

BLOCK_BYTES = 4 << 20
"""Read at once from files that are read from their start to their end."""

_CLIENTS = {"aiohttp", "fsspec", "httpcore", "httpx", "httpx2", "huggingface_hub", "requests", "urllib3"}

T = TypeVar("T")


@dataclass(frozen=True)
class HubFile:
    """A file of a data set at one commit, with the methods of `Path` that readers use. It pickles small.

    Attributes:
        data_set: the name of the data set.
        commit: its revision; the content of a file never changes within one.
        path: path within the repository.
        size: in bytes.
    """

    data_set: str
    commit: str
    path: str
    size: int

    def __str__(self) -> str:
        return f"hf://datasets/{self.data_set}@{self.commit}/{self.path}"

    @property
    def name(self) -> str:
        """Its last part."""
        return PurePosixPath(self.path).name

    @property
    def suffix(self) -> str:
        """Its ending."""
        return PurePosixPath(self.path).suffix

    def open(self, ahead: bool = True) -> IO[bytes]:
        """Open the file for reading, by requests of byte ranges.

        Args:
            ahead: read whole blocks; else only the requested bytes.
        """
        ranges = _Ranges(self)
        return io.BufferedReader(ranges, BLOCK_BYTES) if ahead else cast(IO[bytes], ranges)


class _Ranges(io.RawIOBase):
    """A file of the hub; each read is one request."""

    def __init__(self, file: HubFile) -> None:
        self._file, self._place = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        begin = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._file.size}[whence]
        self._place = begin + offset
        return self._place

    def readinto(self, buffer: Any) -> int:
        stop = min(self._place + len(buffer), self._file.size)
        if stop <= self._place:
            return 0
        found = _fetch(self._file, self._place, stop)
        buffer[: len(found)] = found
        self._place = stop
        return len(found)


def _fetch(file: HubFile, start: int, stop: int) -> bytes:
    """Return some bytes of a file.

    Raises:
        OSError: fewer bytes came, or bytes of a file of another size.
    """
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff

    url = hf_hub_url(file.data_set, file.path, repo_type="dataset", revision=file.commit)
    headers = {**build_hf_headers(), "range": f"bytes={start}-{stop - 1}", "accept-encoding": "identity"}
    answer = http_backoff("GET", url, headers=headers, timeout=TIMEOUT_S, max_retries=0)
    hf_raise_for_status(answer)
    if len(answer.content) != stop - start:
        raise OSError(f"{len(answer.content)} bytes came from byte {start} on, {stop - start} were asked for")
    return answer.content


def may_pass(file: Path | HubFile, error: BaseException) -> bool:
    """Whether to retry a failed read; true for some errors of the hub, never for files of this machine."""
    if not isinstance(file, HubFile) or isinstance(error, FileNotFoundError | gzip.BadGzipFile):
        return False
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return status in (408, 425, 429) or status >= 500
    return isinstance(error, OSError) or type(error).__module__.partition(".")[0] in _CLIENTS


def patiently(file: Path | HubFile, read: Callable[[], T]) -> T:
    """Return the result of `read`; a failing read of the hub is retried for `PATIENCE_S`.

    Raises:
        DataError: the hub has not answered for so long.
    """
    wait, begin = FIRST_WAIT_S, 0.0
    while True:
        try:
            return read()
        except Exception as error:
            if not may_pass(file, error):
                raise
            now = time.monotonic()
            begin = begin or now
            message = said_by(error)
            if now + wait > begin + PATIENCE_S:
                raise DataError(
                    f"{file} could not be read for {PATIENCE_S:g} seconds: {message}; check the network; the "
                    "same command goes on from the last checkpoint"
                ) from error
            sys.stderr.write(f"{file} cannot be read: {message}; tried again in {wait:g} s\n")
        time.sleep(wait)
        wait = min(2 * wait, LONGEST_WAIT_S)


def said_by(error: BaseException) -> str:
    """Return an error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
