"""Signals that ask a process to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from pipeline.distributed.signals import (
    ENDING,
    Interrupted,
    StopRequest,
    default_signals,
    interruptible,
)

STUCK = """
import ctypes, os, signal, threading
from pipeline.distributed.signals import interruptible
with interruptible(force_after=0.3):
    print("ready", flush=True)
    mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex)
    lock(mutex)  # never returns, whatever signal comes
"""


@pytest.mark.parametrize("number", ENDING)
def test_an_ending_signal_raises_once(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    seen = []
    with interruptible(force_after=60):
        try:
            os.kill(os.getpid(), number)
            time.sleep(5)
        except Interrupted as interrupted:
            seen.append(interrupted.number)
        os.kill(os.getpid(), signal.SIGTERM)  # ignored during the shutdown, and only here
        started = subprocess.run(["sh", "-c", "kill -TERM $$"])
        assert started.returncode == -signal.SIGTERM
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    assert seen == [number]
    assert signal.getsignal(number) == before


def test_work_that_defers_a_signal_ends_first() -> None:
    before, done, request = signal.getsignal(signal.SIGTERM), [], StopRequest()

    def work() -> None:
        with request.deferred():
            os.kill(os.getpid(), signal.SIGTERM)
            done.append(request.asked)

    with pytest.raises(Interrupted, match="SIGTERM"):
        work()
    assert done == [True]
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_process_stuck_in_a_native_call_ends_all_the_same() -> None:
    process = subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    time.sleep(0.3)  # until it is in the call
    process.terminate()
    code = process.wait(10)
    process.stdout.close()
    assert code == 143


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interruptible(force_after=60):
            os.kill(os.getpid(), signal.SIGHUP)
        default_signals()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_what_is_forked_ends_by_itself() -> None:
    """A pool ends its processes by SIGTERM when it has lost one; the parent must not end."""
    reader, writer = os.pipe()
    with interruptible(force_after=0.1):
        child = os.fork()
        if not child:
            os.write(writer, b"!")
            time.sleep(30)
            os._exit(0)
        os.read(reader, 1)
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
        time.sleep(0.3)  # this process would have ended


def test_a_signal_that_a_stage_handles_ends_nothing() -> None:
    seen = []
    with interruptible(force_after=0.1):
        signal.signal(signal.SIGUSR1, lambda number, _: seen.append(number))
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.3)
    assert seen == [signal.SIGUSR1]
