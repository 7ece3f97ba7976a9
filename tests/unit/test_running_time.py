"""The clock for promised bounds counts a wait, and not the time for which the process stood."""

from __future__ import annotations

import os
import re
import subprocess
import time

import pytest

from tests.running_time import RunningTime

pytestmark = pytest.mark.clock


def test_a_wait_counts_and_a_stop_of_the_process_does_not() -> None:
    began_s = time.monotonic()
    with RunningTime() as running:
        time.sleep(0.5)
        waited_s, stopped_s = running.now_s(), time.monotonic()
        assert 0.02 < waited_s <= stopped_s - began_s
        stop = f"kill -STOP {os.getpid()}; sleep 1; kill -CONT {os.getpid()}"
        subprocess.run(["sh", "-c", stop], check=True)
        stood_s = time.monotonic() - stopped_s - (running.now_s() - waited_s)
    assert stood_s > 0.9


def test_code_that_holds_up_every_thread_counts() -> None:
    with RunningTime() as running:
        began_s = time.process_time()
        re.match("(a+)+$", "a" * 23 + "b")  # one call, in which no other thread gets its turn
        held_s = time.process_time() - began_s
        assert running.now_s() > held_s / 2 > 0.1
