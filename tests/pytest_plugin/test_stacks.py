"""Reading faulthandler's text: a place in the user's code, and whether it waits for others."""

from __future__ import annotations

import sysconfig

from ddpdebug.pytest_plugin.stacks import place, stack_of_test, text_of, waits_for_peers

_LIB = sysconfig.get_paths()["purelib"]
_RUNNER = (
    f'  File "{_LIB}/_pytest/python.py", line 166 in pytest_pyfunc_call\n'
    f'  File "{_LIB}/_pytest/runner.py", line 1 in pytest_runtest_call\n'
)
_OTHER = 'Thread 0x00007f (most recent call first):\n  File "/usr/lib/threading.py", line 3 in wait\n\n'
_MAIN = "Current thread 0x00007e (most recent call first):\n"
_COLLECTIVE = (
    f'  File "{_LIB}/torch/distributed/distributed_c10d.py", line 5356 in barrier\n'
    f'  File "{_LIB}/torch/distributed/c10d_logger.py", line 83 in wrapper\n'
)
_USER = '  File "/home/me/project/train.py", line 7 in step\n  File "/home/me/project/test_it.py", line 9 in test_it\n'


def test_the_innermost_line_of_the_user_is_the_place() -> None:
    """With the function of torch that it waits in, relative to the root."""
    text = _OTHER + _MAIN + _COLLECTIVE + _USER + _RUNNER
    assert place(text, "/home/me/project") == "train.py:7 in step, inside barrier"
    assert place(text, "/elsewhere") == "/home/me/project/train.py:7 in step, inside barrier"
    assert waits_for_peers(text)
    assert [frame.function for frame in stack_of_test(text)] == ["barrier", "wrapper", "step", "test_it"]
    assert text_of(text).splitlines()[0] == '  File "/home/me/project/test_it.py", line 9, in test_it'


def test_a_loop_of_the_user_waits_for_nobody() -> None:
    """It is the culprit then."""
    text = _MAIN + _USER + _RUNNER
    assert place(text, "/home/me/project") == "train.py:7 in step"
    assert not waits_for_peers(text)


def test_a_backward_may_wait_for_peers() -> None:
    """DDP's reduction has no frame of its own."""
    assert waits_for_peers(_MAIN + f'  File "{_LIB}/torch/autograd/graph.py", line 9 in run\n' + _USER + _RUNNER)


def test_a_stack_without_a_test_is_no_place() -> None:
    """A rank that could not answer."""
    assert place("", "/") == "a place that it could not tell"
    assert not waits_for_peers(_OTHER)
