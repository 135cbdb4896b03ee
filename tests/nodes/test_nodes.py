"""Jobs over several hosts: attached they train what they train plain, and are compared or say why not.

Each host is a set of namespaces (`network.py`); what the links do is carried out between them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
from network import Host, Link, hosts, refusal
from node_jobs import PORT, Outcome, train

_REFUSAL = refusal()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.jobs,
    pytest.mark.skipif(_REFUSAL is not None, reason=str(_REFUSAL)),
]

OPTIONS = ["--metrics", "off"]
#: Few ranks, or as if they were very many.
TREES = [(), ("--tree",)]


#: What plain jobs have trained, by their hosts and words: the bits are the same whatever the links do.
_plain: dict[tuple[int, tuple[str, ...]], Outcome] = {}


def _pair(at: list[Host], folder: Path, *words: str, **options: object) -> Outcome:
    """Run the job attached, and plain unless that has been done; return the attached one if it has trained the same."""
    key = len(at), tuple(word for word in words if word != "--tree")  # which changes what is attached
    if key not in _plain:
        _plain[key] = train(at, folder / "plain", *words, **options)
    plain = _plain[key]
    assert plain.statuses == [0] * len(plain.statuses), plain.text
    attached = train(at, folder / "attached", *words, attached=OPTIONS, **options)
    assert attached.training == plain.training, attached.text
    assert ("over a tree" in attached.text) == ("--tree" in words)
    return attached


def _compared(outcome: Outcome) -> bool:
    return "the ranks agreed in all" in outcome.text and "switched itself off" not in outcome.text


@pytest.mark.parametrize(
    ("count", "words"),
    [
        pytest.param(2, TREES[0], marks=pytest.mark.smoke),
        pytest.param(2, TREES[1], marks=pytest.mark.thorough),
        pytest.param(4, TREES[0], marks=pytest.mark.thorough),
        (4, TREES[1]),
    ],
)
def test_a_healthy_job(tmp_path: Path, count: int, words: tuple[str, ...]) -> None:
    """Two ranks on each host."""
    with hosts(count) as at:
        outcome = _pair(at, tmp_path, *words)
    assert {trained["host"] for trained in outcome.trained.values()} == {host.name for host in at}
    assert outcome.findings == []
    assert _compared(outcome), outcome.text


@pytest.mark.parametrize("words", [TREES[0], pytest.param(TREES[1], marks=pytest.mark.thorough)])
def test_a_finding_names_the_host(tmp_path: Path, words: tuple[str, ...]) -> None:
    """On the terminal, and in the file for what reads it later."""
    with hosts(2) as at:
        outcome = _pair(at, tmp_path, "--fault", "rate", *words)
    assert [(found["code"], found["ranks"], found["places"]) for found in outcome.findings[:1]] == [
        ("RANK104", [2], {"2": "node-b"})
    ]
    assert "step 0 · rank 2 (node-b)" in outcome.text


@pytest.mark.parametrize(
    ("names", "words"),
    [
        pytest.param({"own": "127.0.1.1"}, TREES[0], id="loopback", marks=pytest.mark.thorough),
        pytest.param({}, TREES[1], id="unknown"),
    ],
)
def test_names_that_lead_nowhere(tmp_path: Path, names: dict[str, str], words: tuple[str, ...]) -> None:
    """Where the job's own backend does not ask for a host's name, its ranks are compared all the same."""
    with hosts(2, names=names) as at:
        outcome = _pair(at, tmp_path, "--backend", "store", "--fault", "rate", *words)
    assert [(found["code"], found["ranks"]) for found in outcome.findings[:1]] == [("RANK104", [2])], outcome.text


@pytest.mark.thorough
def test_the_first_host_reaches_the_store_by_loopback(tmp_path: Path) -> None:
    """As where `/etc/hosts` gives a host's own name a loopback address: the others reach it by another."""
    with hosts(2, names={"first": "10.77.0.1", "own": "127.0.1.1"}) as at:
        at[0].rename("first", "127.0.1.1")
        outcome = _pair(at, tmp_path, "--backend", "store", "--fault", "rate", master="first")
    assert [(found["code"], found["ranks"]) for found in outcome.findings[:1]] == [("RANK104", [2])], outcome.text


@pytest.mark.parametrize(
    ("link", "words"),
    [
        pytest.param(Link(delay=0.02), TREES[1], id="slow", marks=pytest.mark.thorough),
        pytest.param(Link(loss=0.02), TREES[0], id="lossy"),
    ],
)
def test_a_bad_link(tmp_path: Path, link: Link, words: tuple[str, ...]) -> None:
    """It makes the job slow, and nothing is accused of it in so few steps."""
    with hosts(2, link) as at:
        outcome = _pair(at, tmp_path, *words)
    assert outcome.findings == []
    assert _compared(outcome), outcome.text


@pytest.mark.parametrize("words", [TREES[0], pytest.param(TREES[1], marks=pytest.mark.thorough)])
def test_a_firewall_that_passes_only_the_store(tmp_path: Path, words: tuple[str, ...]) -> None:
    """The ranks find each other there and cannot connect: they say so, and the job is none the wiser."""
    with hosts(2, Link(ports=frozenset({PORT}))) as at:
        outcome = _pair(at, tmp_path, "--backend", "store", *words)
    assert outcome.findings == []
    assert "nothing is compared between the ranks" in outcome.text
