"""The fan-out isolates sinks from each other and from training."""

from __future__ import annotations

import signal
import threading

import pytest

from ddpdebug.sinks import Record, Trouble
from ddpdebug.sinks.fanout import Fanout

NEWS = Trouble(part="probe:loss", message="news")


class Keeping:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.closed = 0

    def write(self, record: Record) -> None:
        """Keep the record."""
        self.records.append(record)

    def close(self) -> None:
        """Count the calls."""
        self.closed += 1


class Failing(Keeping):
    """Fails always."""

    def write(self, record: Record) -> None:
        """Keep the record, then fail."""
        super().write(record)
        raise OSError(28, "No space left on device")


def test_every_sink_gets_every_record_in_order() -> None:
    """Nothing is lost and nothing changes places."""
    sinks = [Keeping(), Keeping()]
    fanout = Fanout(sinks)
    records = [Trouble(part=str(i), message="") for i in range(5)]
    for record in records:
        fanout.write(record)
    assert sinks[0].records == sinks[1].records == records


def test_a_failing_sink_is_dropped_with_one_trouble_to_the_others() -> None:
    """It is asked once, released, and the others learn of it once."""
    before, bad, after = Keeping(), Failing(), Keeping()
    fanout = Fanout([before, bad, after])
    fanout.write(NEWS)
    fanout.write(NEWS)
    trouble = Trouble(part="sink:test_fanout", message="OSError: [Errno 28] No space left on device")
    assert before.records == after.records == [NEWS, trouble, NEWS]
    assert (len(bad.records), bad.closed) == (1, 1)


def test_when_all_sinks_fail_writing_goes_on_without_harm() -> None:
    """Each is asked once, and nothing is raised."""
    sinks = [Failing(), Failing(), Failing()]
    fanout = Fanout(sinks)
    fanout.write(NEWS)
    fanout.write(NEWS)
    assert [len(sink.records) for sink in sinks] == [1, 1, 1]


def test_a_second_thread_never_waits_for_a_slow_sink() -> None:
    """It leaves its record to the thread that is writing."""
    entered, go_on = threading.Event(), threading.Event()

    class Slow(Keeping):
        def write(self, record: Record) -> None:
            entered.set()
            assert go_on.wait(60)
            super().write(record)

    slow = Slow()
    fanout = Fanout([slow])
    thread = threading.Thread(target=fanout.write, args=(NEWS,))
    thread.start()
    assert entered.wait(60)
    late = Trouble(part="late", message="")
    fanout.write(late)  # returns although the sink is stuck
    assert slow.records == []
    go_on.set()
    thread.join(60)
    assert slow.records == [NEWS, late]


def test_closing_releases_every_sink() -> None:
    """Also those after one whose close fails."""

    class Stuck(Keeping):
        def close(self) -> None:
            raise RuntimeError("stuck")

    kept = Keeping()
    Fanout([Stuck(), kept]).close()
    assert kept.closed == 1


def test_what_a_signal_handler_raises_while_a_sink_writes_is_the_jobs() -> None:
    """The sink stays, the others get their record, and the error goes on its way."""

    class Interrupted(Keeping):
        def write(self, record: Record) -> None:
            super().write(record)
            signal.raise_signal(signal.SIGALRM)

    def handler(_: int, __: object) -> None:
        raise MemoryError("from the handler")

    before = signal.signal(signal.SIGALRM, handler)
    bad, after = Interrupted(), Keeping()
    fanout = Fanout([bad, after])
    try:
        for _ in range(2):
            with pytest.raises(MemoryError, match="from the handler"):
                fanout.write(NEWS)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert bad.records == after.records == [NEWS, NEWS]
