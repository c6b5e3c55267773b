"""Work in threads that end with it."""

import os
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
    code = "from tokenizer.threads import run_apart; run_apart('apart', 1, lambda: None);"
    code += "import torch; print(torch.get_num_threads())"
    two_cores = os.environ | {"OMP_NUM_THREADS": "2"}
    assert subprocess.check_output([sys.executable, "-c", code], env=two_cores) == b"2\n"
