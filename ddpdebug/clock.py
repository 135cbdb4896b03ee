"""The functions of `time` and `datetime` as they were when ddpdebug was loaded, even if the script replaces them later.

A script may replace the functions of the module `time` (to test, to warp time), or have a library do that in every
loaded module that has them under some name. So ours are attributes of a class, which are found neither way, and no
other module of ddpdebug imports `time` or asks `datetime` what time it is.
"""

from __future__ import annotations

import datetime as _datetime
import time as _time


class time:  # noqa: N801 - it stands for the module of this name
    """The functions of the module `time` that ddpdebug uses."""

    monotonic = staticmethod(_time.monotonic)
    monotonic_ns = staticmethod(_time.monotonic_ns)
    perf_counter = staticmethod(_time.perf_counter)
    process_time = staticmethod(_time.process_time)
    thread_time = staticmethod(_time.thread_time)
    time = staticmethod(_time.time)
    time_ns = staticmethod(_time.time_ns)
    sleep = staticmethod(_time.sleep)
    gmtime = staticmethod(_time.gmtime)
    strftime = staticmethod(_time.strftime)
    date = _datetime.datetime


def utc_now() -> _datetime.datetime:
    """Return the date and time in UTC."""
    return time.date.now(_datetime.UTC)
