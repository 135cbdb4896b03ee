"""What is said of an exception is read without calling code of the script."""

from __future__ import annotations

import pytest
from torch._utils import KeyErrorMessage

from ddpdebug.errors import text_of


class _Word(str):
    __slots__ = ()

    def __str__(self) -> str:
        raise AssertionError

    __repr__ = __str__


class _LoudError(RuntimeError):
    def __str__(self) -> str:
        raise AssertionError


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (RuntimeError("no room"), "RuntimeError: no room"),
        (KeyError("name"), "KeyError: 'name'"),
        (
            KeyError(KeyErrorMessage("Caught KeyError in DataLoader worker process 0.")),
            "KeyError: Caught KeyError in Data",
        ),
        (ValueError(_Word("its text")), "ValueError: its text"),
        (ValueError(_Word("its text"), 3), "ValueError"),
        (_LoudError("its text"), "_LoudError"),
        (OSError(28, "No space left on device"), "OSError: [Errno 28] No space left on device"),
        (ValueError(object()), "ValueError"),
    ],
)
def test_an_error_is_read_as_far_as_the_interpreter_makes_its_text(error: Exception, text: str) -> None:
    """Texts of a class of their own are read as the texts that they are."""
    assert text_of(error).startswith(text)
    assert (text_of(error) == text) or "Caught" in text
