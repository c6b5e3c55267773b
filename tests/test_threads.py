"""Work in threads that end with it."""

import subprocess
import sys
import threading

import pytest
import torch

from tokenizer.threads import run_apart


def test_work_runs_in_a_thread_that_ends_with_it():
    own = torch.get_num_threads()
    name, cores, thread = run_apart(
        "apart", 1, lambda: (threading.current_thread().name, torch.get_num_threads(), threading.current_thread())
    )
    assert (name, cores) == ("apart_0", 1)
    assert not thread.is_alive()
    assert torch.get_num_threads() == own


def test_what_the_work_raises_is_raised():
    with pytest.raises(ZeroDivisionError):
        run_apart("apart", 1, lambda: 1 // 0)


def test_a_caller_that_never_asked_keeps_its_number_of_cores():
    """torch gives a thread its number when it is first asked for, and one thread's number to all that come later."""
    ask = "import torch; print(torch.get_num_threads())"
    apart = "from tokenizer.threads import run_apart; run_apart('apart', 1, lambda: None);"
    own, after = (subprocess.check_output([sys.executable, "-c", code]) for code in (ask, apart + ask))
    assert after == own
