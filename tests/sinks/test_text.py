"""Findings as people read them."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from ddpdebug.errors import essence
from ddpdebug.schema.finding import Finding, Severity
from ddpdebug.sinks.text import evidence_lines, parts, subjects, where
from ddpdebug.sinks.words import clean, counted, number, ranks_text


@given(st.text())
def test_clean_texts_are_printable_and_on_one_line(text: str) -> None:
    """Whatever the job calls its parameters."""
    assert clean(text).isprintable()


def test_escape_sequences_and_bidirectional_overrides_are_shown_not_obeyed() -> None:
    """A name cannot clear the screen or turn the text around."""
    assert clean("a\x1b[31m\n\u202e\x9b") == r"a\x1b[31m\n\u202e\x9b"


def test_long_texts_lose_their_middle() -> None:
    """The ends of a module path say the most."""
    assert clean("a" * 50 + "b" * 50, 20) == "aaaaaaaaaa…bbbbbbbbb"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0131, "0.0131"), (131072.25, "1.311e5"), (1e-8, "1e-8"), (12, "12"), (True, "true"),
     (float("nan"), "nan"), (float("-inf"), "-inf"), (2.0, "2"), (10**12, "1000000000000")],
)  # fmt: skip
def test_numbers_are_short(value: float, text: str) -> None:
    """Four digits, no padded exponents."""
    assert number(value) == text


def test_an_integer_beyond_every_float_is_a_text() -> None:
    """JSON of a damaged file may hold one."""
    (line,) = evidence_lines({"count": 10**400})
    assert line.startswith("count: 1000")
    assert len(line) < 200


@pytest.mark.parametrize(
    ("ranks", "world", "text"),
    [((2,), 4, "rank 2"), ((7, 0, 1, 2, 3), 64, "ranks 0-3,7"), ((0, 1), 2, "both ranks"),
     ((0, 1, 2), 3, "all 3 ranks"), ((0,), 1, "rank 0"), ((0, 2), None, "ranks 0,2"),
     (tuple(range(0, 8192, 2)), 8192, "ranks 0,2,4,6,8,10,12,14,16,18,20,22,24,26,28,30 and 4080 more"),
     (tuple(range(1003)), 1024, "ranks 0-1002")],
)  # fmt: skip
def test_ranks_are_named_as_ranges(ranks: tuple[int, ...], world: int | None, text: str) -> None:
    """Thousands fit on a line, and their number is true."""
    assert ranks_text(ranks, world) == text


def finding(**fields: object) -> Finding:
    """Build a finding."""
    return Finding(**{"code": "RANK101", "severity": Severity.CRITICAL, "title": "t", **fields})  # type: ignore[arg-type]


def test_unknown_places_are_left_out() -> None:
    """Nothing is guessed."""
    assert where(finding()) == ""
    assert where(finding(step=5, ranks=(1,), phase="init", location="a.py:3")) == "step 5 · rank 1 · init · a.py:3"
    assert parts(finding()) == [("next", ["ddpdebug explain RANK101"])]


def test_three_subjects_are_named_and_the_others_counted() -> None:
    """A finding over a thousand parameters stays a few lines."""
    assert subjects(finding(subject=("a", "b", "c"))) == ["a", "b", "c"]
    assert subjects(finding(subject=tuple("abcde"))) == ["a", "b", "c", "and 2 more"]


def test_values_by_rank_are_grouped_with_the_odd_ones_first() -> None:
    """And with as many digits as show the difference."""
    values = {str(rank): 0.001 for rank in range(64)}
    values["7"] = 0.0010000001
    assert evidence_lines({"values": values}) == ["values: rank 7 = 0.0010000001, ranks 0-6,8-63 = 0.001"]
    assert evidence_lines({"values": {"0": "nan", "1": float("nan")}}) == ["values: ranks 0-1 = nan"]
    many = evidence_lines({"lr": {str(rank): rank for rank in range(10)}})
    assert many == ["lr: rank 0 = 0, rank 1 = 1, rank 2 = 2, rank 3 = 3 and 6 more values"]


def test_short_evidence_shares_a_line_and_much_of_it_is_cut() -> None:
    """Lists, tables and unknown values included."""
    assert evidence_lines({"index": [4, 17], "ratio": 0.5, "hook": None, "group": {"lr": 0.1}}) == [
        "index: [4, 17] · ratio: 0.5 · group: lr 0.1"
    ]
    assert evidence_lines({"shape": list(range(9))}) == ["shape: [0, 1, 2, 3, 4, 5, …]"]
    assert evidence_lines({f"k{i}": i for i in range(8)})[-1] == "and 2 more in the run directory"
    assert evidence_lines({}) == []


def test_tensors_are_described_on_lines_of_their_own() -> None:
    """Type, shape, range and what is odd in them."""
    zeros = {"name": "self", "dtype": "float32", "shape": [3, 4], "device": "cpu", "min": 0.0, "max": 2.5}
    operands = [{**zeros, "zeros": 1, "nan": 0, "inf": 2}, {"shape": [0]}, {"name": "exponent", "value": 0.5}]
    assert evidence_lines({"operation": "PowBackward0", "operands": operands}) == [
        "operation: PowBackward0",
        "operands: self = float32 [3, 4], 0 to 2.5, 1 zero, 2 inf",
        "operands: tensor [0], empty",
        "operands: exponent 0.5",
    ]


def test_a_bundle_is_something_to_do() -> None:
    """The command that replays it stands among the next steps, escaped, and not in the evidence."""
    told = dict(parts(finding(actions=["x"], evidence={"kinds": ["NaN"], "bundle": "runs/NUM301\x1b"})))
    assert told["evidence"] == ["kinds: NaN"]
    assert told["next"] == ["x", "ddpdebug replay runs/NUM301\\x1b", "ddpdebug explain RANK101"]


def test_causes_are_hypotheses_and_the_first_action_comes_with_the_page_to_read() -> None:
    """Two causes and one action; information has none."""
    told = dict(parts(finding(causes=["a", "b", "c"], actions=["x", "y"])))
    assert told["perhaps"] == ["1. a", "2. b"]
    assert told["next"] == ["x", "ddpdebug explain RANK101"]
    assert "perhaps" not in dict(parts(finding(severity=Severity.INFO, causes=["a"], actions=["x"])))


def test_counts_have_the_right_plural() -> None:
    """One step, two steps."""
    assert [counted(n, "step") for n in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]


def test_errors_are_told_by_what_they_say() -> None:
    """Places in torch's sources and advice for every case are left out; of a worker's error the one in it is told."""
    gloo = "RuntimeError: [/build/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:40. "
    assert essence(gloo + "This is typically caused by a remote worker crashing. Check the logs.") == (
        "RuntimeError: Connection closed by peer [127.0.0.1]:40."
    )
    trace = "Original Traceback (most recent call last):\n  File 'a.py', line 3\nKeyError: 20\n"
    assert essence(f"KeyError: Caught KeyError in DataLoader worker process 0.\n{trace}") == (
        "KeyError: Caught KeyError in DataLoader worker process 0. KeyError: 20"
    )
    assert essence("ValueError: " + "x" * 400).endswith("x…")


def test_the_text_of_an_error_has_a_line_of_its_own() -> None:
    """People search for it: it is not cut in its middle where it is short enough for a few lines."""
    text = "RuntimeError: " + "x" * 300
    assert evidence_lines({"module": "fc", "error": text}) == ["module: fc", f"error: {text}"]


@pytest.mark.parametrize(
    ("places", "text"),
    [
        ({}, "step 3 · ranks 4-5"),
        ({"4": "node-b, cuda:0"}, "step 3 · ranks 4-5"),
        ({"4": "node-b, cuda:0", "5": "node-b, cuda:1"}, "step 3 · ranks 4-5 (node-b)"),
        ({"4": "node-b", "5": "node-c\x1b"}, r"step 3 · ranks 4-5 (node-b, node-c\x1b)"),
    ],
)
def test_ranks_on_several_hosts_are_named_with_their_hosts(places: dict[str, str], text: str) -> None:
    """Where all of them are known."""
    finding = Finding(
        code="RANK104", severity=Severity.ERROR, title="settings differ", step=3, ranks=(4, 5), places=places
    )
    assert where(finding) == text


def test_one_rank_is_named_with_its_device_and_very_many_hosts_are_not() -> None:
    """The ranks alone say as much."""
    finding = Finding(code="X1", severity=Severity.ERROR, title="t", ranks=(5,), places={"5": "node-b, cuda:1"})
    assert where(finding) == "rank 5 (node-b, cuda:1)"
    many = {str(rank): f"node-{rank}" for rank in range(4)}
    assert where(Finding(code="X1", severity=Severity.ERROR, title="t", ranks=(0, 1, 2, 3), places=many)) == "ranks 0-3"
