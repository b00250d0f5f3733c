"""The streams of a run: nothing waits for their reader, and lines that are dropped are counted."""

import os
import re
import subprocess
import sys
import threading

import pytest
from forge_trainer import console_queue
from forge_trainer.console_queue import ConsoleQueue, queued_console


@pytest.fixture
def pipe():
    read, write = os.pipe()
    with open(read, "rb") as reader, open(write, "w") as writer:
        yield reader, writer


def test_lines_beyond_what_may_wait_are_dropped_and_counted(pipe, monkeypatch):
    monkeypatch.setattr(console_queue, "MOST_BYTES", 200_000)
    reader, writer = pipe
    out, line = ConsoleQueue(writer), b"x" * 99 + b"\n"
    for _ in range(5000):
        out.write(line)
    lines: list[bytes] = []
    reading = threading.Thread(target=lambda: lines.extend(iter(reader.readline, b"end\n")))
    reading.start()
    assert out.drain()
    out.write(b"end\n")
    assert out.drain()
    reading.join()
    notes = [re.fullmatch(rb"\[(\d+) lines were dropped here: nobody read them\]\n", one) for one in lines]
    arrived = [one for one, note in zip(lines, notes, strict=True) if note is None]
    assert set(arrived) == {line} and 2000 <= len(arrived) < 5000
    assert len(arrived) + sum(int(note[1]) for note in notes if note) == 5000


def test_all_that_is_printed_arrives_in_order(pipe, monkeypatch):
    reader, writer = pipe
    monkeypatch.setattr(sys, "stdout", writer)
    with queued_console():
        assert sys.stdout is not writer
        for number in range(100):
            print(number)
    assert sys.stdout is writer
    writer.close()
    assert reader.read().split() == [b"%d" % number for number in range(100)]


STANDS_STILL = """
import sys
from forge_trainer import console_queue
console_queue.PATIENCE_S = 0.2
with console_queue.queued_console():
    print("x" * 200_000)
print("y" * 200_000)
sys.exit(7)
"""


def test_reader_that_stands_still_is_given_up_at_the_end(pipe):
    _, writer = pipe
    done = subprocess.run([sys.executable, "-c", STANDS_STILL], stdout=writer, timeout=60)
    assert done.returncode == 7


def test_forked_process_writes_by_itself(pipe, monkeypatch):
    reader, writer = pipe
    monkeypatch.setattr(sys, "stderr", writer)
    with queued_console():
        if (child := os.fork()) == 0:
            sys.stderr.write("from a child")
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    assert os.read(reader.fileno(), 100) == b"from a child"
