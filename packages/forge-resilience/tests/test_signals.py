import os
import signal
import subprocess
import sys
import time

import pytest
from forge_resilience.signals import Signals, Stopped, _Watch
from forge_resilience.verdict import Verdict


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP]
)
def test_signals_turn_into_stop_and_handlers_come_back(number):
    inherited = signal.signal(number, signal.SIG_DFL)  # nohup leaves SIGHUP ignored, which stays so
    before = signal.getsignal(number)
    with Signals() as signals:
        assert signals.verdict() == Verdict.CONTINUE
        signal.raise_signal(number)
        assert signals.verdict() == Verdict.STOP
        assert signals.received == number
    assert signal.getsignal(number) is before
    signal.signal(number, inherited)


def test_signals_repeated_within_a_moment_change_nothing():
    with Signals() as signals:
        for _ in range(5):
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)
        assert signals.received == signal.SIGTERM


def test_signals_second_interrupt_of_a_person_ends_the_process(monkeypatch):
    with Signals():
        signal.raise_signal(signal.SIGINT)
        now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now + 5)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
            signal.sigtimedwait([], 0.1)


def test_signals_first_interrupt_after_another_signal_changes_nothing(monkeypatch):
    with Signals() as signals:
        signal.raise_signal(signal.SIGUSR1)
        now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now + 5)
        signal.raise_signal(signal.SIGINT)
        assert signals.received == signal.SIGUSR1


def test_signals_raise_once_during_the_start_and_are_not_forgotten():
    with Signals(starting=True) as signals:
        signals.loaded()
        with pytest.raises(Stopped):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Stopped):
            signals.started()
        assert signals.starting


def test_signals_only_ask_once_the_start_is_over():
    with Signals(starting=True) as signals:
        signals.started()
        signal.raise_signal(signal.SIGTERM)
        assert signals.verdict() == Verdict.STOP
        assert not signals.starting


def test_signals_to_another_rank_end_the_start_of_this_one():
    with Signals(starting=True) as signals, pytest.raises(Stopped):
        signals.started(lambda verdict: Verdict.STOP)


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


def test_signals_end_a_start_at_once_while_modules_are_loaded():
    """An exception there could be swallowed, or crash a C extension that starts."""
    done = run_python("""if True:
        import signal
        from forge_resilience.signals import Signals
        with Signals(starting=True):
            try:
                signal.raise_signal(signal.SIGTERM)
            except BaseException:
                print("went on")
            print("went on")
    """)
    assert (done.returncode, done.stdout) == (85, "")
    assert done.stderr == "stopped by SIGTERM before the first step of this start; start it again\n"


def test_signals_end_a_start_whose_main_thread_waits_in_c_code():
    done = run_python("""if True:
        import ctypes, os, signal, threading
        from forge_resilience import signals
        signals.STUCK_S = 0.1
        mutex, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        with signals.Signals(starting=True):
            libc.pthread_mutex_lock(mutex)
            libc.pthread_mutex_lock(mutex)
    """)
    assert done.returncode == 85
    assert "did not react" in done.stderr


def test_signals_in_a_forked_process_do_nothing():
    done = run_python("""if True:
        import os, signal
        from forge_resilience.signals import Signals
        with Signals(starting=True) as signals:
            child = os.fork()
            if child == 0:
                signal.raise_signal(signal.SIGTERM)
                os._exit(7 if signals.received is None else 8)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
            signals.started()
    """)
    assert done.returncode == 0, done.stderr


def test_signals_ignored_at_the_end_do_not_change_the_exit_code():
    done = run_python("""if True:
        import os, signal, sys
        from forge_resilience.signals import STOPPING, Signals
        with Signals() as signals:
            signals.ignore()
        # a handler would go before the process does
        assert all(signal.getsignal(number) == signal.SIG_IGN for number in STOPPING)
        signal.raise_signal(signal.SIGTERM)
        sys.exit(85)
    """)
    assert done.returncode == 85


def test_watch_ends_whenever_a_signal_came_before():
    for pause_s in (0.0, 0.001, 0.01):
        for _ in range(20):
            watch = _Watch()
            os.write(watch._write, bytes([signal.SIGTERM]))
            watch._ended.set()
            time.sleep(pause_s)  # the thread may be anywhere
            watch.end()
            assert not watch._thread.is_alive()
