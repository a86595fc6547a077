"""Calls that run at once: how their results, their errors and Ctrl-C end them."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest

from llmserve_certify.at_once import Late, at_once

INTERRUPTED = """
import os, signal, threading, time
from llmserve_certify.at_once import at_once

def first():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)

at_once([first, lambda: time.sleep(60)], 2)
"""


def test_results_are_in_order_and_no_more_than_allowed_run() -> None:
    running, most, lock = 0, 0, threading.Lock()

    def call(number: int) -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.001 * (number % 3))
        with lock:
            running -= 1
        return number

    assert at_once([partial(call, number) for number in range(30)], 4) == [*range(30)]
    assert most <= 4
    assert at_once([], 4) == []


def test_an_error_waits_for_what_runs_and_begins_nothing_more() -> None:
    begun: set[int] = set()
    ended: set[int] = set()
    go = threading.Event()

    def fail() -> None:
        go.wait(10)
        raise LookupError("first")

    def call(number: int) -> None:
        begun.add(number)
        go.set()
        time.sleep(0.02)
        ended.add(number)

    calls: list[Callable[[], None]] = [fail, *(partial(call, number) for number in range(9))]
    with pytest.raises(LookupError, match="first"):
        at_once(calls, 2)
    assert begun == ended
    assert len(begun) < 9


@pytest.mark.parametrize("fails", [False, True])
def test_what_takes_too_long_is_waited_for_no_longer(fails: bool) -> None:
    go = threading.Event()

    def call() -> None:
        if fails:
            raise LookupError("first")
        go.wait(60)

    def late() -> None:
        go.wait(60)

    began = time.monotonic()
    with pytest.raises(LookupError if fails else Late):
        at_once([call, lambda: None, late], 3, 0.1)
    assert time.monotonic() - began < 10
    go.set()


def test_ctrl_c_waits_for_nothing_that_runs() -> None:
    result = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=30, check=False
    )
    assert result.stderr.rstrip().splitlines()[-1].startswith("KeyboardInterrupt")
