"""Threads that compute do not spin while other processes need the cores."""

import os
import subprocess
import sys
import threading
import time

import pytest
import torch

from tokenizer.cores import SpinLimiter, used_by_others

CORES = len(os.sched_getaffinity(0))


def _idle_teams() -> int:
    return sum(thread.name == "terra-idle-team" for thread in threading.enumerate())


def _looks(num_threads: int, *used: float) -> list[bool]:
    """Whether a limiter limits after each second in which others have used so many cores."""
    readings = [(0.0, 50.0)]
    for each in used:
        readings.append((readings[-1][0] + 1, readings[-1][1] + each))
    limiter, found = SpinLimiter(num_threads, iter(readings).__next__), []
    for _ in used:
        limiter.look()
        found.append(limiter.limits)
    return found


def test_threads_sleep_while_others_use_the_cores_and_spin_again_afterwards() -> None:
    before = _idle_teams()
    assert _looks(CORES, 0.0, 1.0, 0.9, 0.0) == [False, True, True, False]
    deadline = time.monotonic() + 30
    while _idle_teams() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert _idle_teams() == before


def test_others_may_use_the_cores_that_no_thread_needs() -> None:
    assert _looks(CORES - 1, 0.9, 0.0) == [False, False]


def test_what_is_unknown_limits_nothing() -> None:
    limiter = SpinLimiter(CORES, lambda: None)
    limiter.look()
    assert not limiter.limits


def test_the_idle_team_changes_no_bit() -> None:
    left, right = torch.rand(300, 700), torch.rand(700, 500)
    expected = left @ right
    limiter = SpinLimiter(CORES, iter([(0.0, 0.0), (1.0, float(CORES)), (2.0, float(CORES))]).__next__)
    limiter.look()
    assert limiter.limits
    assert torch.equal(left @ right, expected)
    limiter.look()
    assert not limiter.limits


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/stat")
def test_another_process_counts_and_this_one_does_not() -> None:
    before = used_by_others()
    subprocess.run([sys.executable, "-S", "-c", "import time\nwhile time.process_time() < 0.5: pass"], check=True)
    end = time.process_time() + 0.5
    while time.process_time() < end:
        pass
    after = used_by_others()
    assert before is not None
    assert after is not None
    # The kernel counts in steps of 0.01 s; other processes of the machine add to the sum.
    assert after[1] - before[1] > 0.4
    assert after[1] - before[1] < (after[0] - before[0]) * CORES - 0.4


@pytest.mark.parametrize(("first", "expected"), [("terra", "1000"), ("torch", None)])
def test_import_terra_limits_spinning_if_it_comes_before_torch(first: str, expected: str | None) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    code = f"import {first}, terra, os; print(os.environ.get('GOMP_SPINCOUNT'))"
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    assert found.stdout.strip() == str(expected)
