"""The order of a finding's causes and remedies: those that its own evidence supports come first. Torch-free."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ddpdebug.schema.finding import Finding

_TAGS = re.compile(r"(?:`[\w -]+`, )*`[\w -]+`: ")
_TAG = re.compile(r"`([\w -]+)`")
#: `SqrtBackward0` and `aten._softmax.default` are looked for as `sqrt` and `softmax`.
_ATEN = re.compile(r"\baten\._*(\w+?)_?(?=\.)")
_NODE, _CAPITAL = re.compile(r"\b(\w+?)Backward(\d*)\b"), re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
#: Evidence that names a place, a file or a parameter: its words are the script's.
_PLACES = frozenset(
    {
        "called_at",
        "backward_at",
        "loss_at",
        "bundle",
        "no_bundle",
        "first_parameter",
        "masked_in",
        "minus_inf_before_in",
    }
)
#: The places of what has no tag, and of what belongs to other findings.
_OF_ALL, _OF_OTHERS = 3, 4
#: Evidence that says more than the phase does.
_LOUDEST = "flipped bits"


def likeliest_first(finding: Finding) -> tuple[list[str], list[str]]:
    """Return the causes and the remedies of a finding, those with the most support in its evidence first.

    One may begin with tags: words in backticks, separated by commas, with a colon behind the last. A tag fits where it
    is the finding's phase, and where its words stand in the evidence (as the name of an entry, in a text, as an
    operation); `from the start` and `later` fit by the step. First comes what fits the phase and the evidence, then the
    phase, then the evidence, then what has no tag, last what belongs to others.
    """
    place = _places(finding)
    return sorted(finding.causes, key=place), sorted(finding.actions, key=place)


def fitting(finding: Finding) -> tuple[list[str], list[str]]:
    """Return the causes and remedies without tags, and without those for other evidence unless nothing else is left."""
    place = _places(finding)

    def kept(texts: list[str]) -> list[str]:
        return [untagged(text) for text in [text for text in texts if place(text) < _OF_OTHERS] or texts]

    causes, actions = likeliest_first(finding)
    return kept(causes), kept(actions)


def _places(finding: Finding) -> Callable[[str], int]:
    """Return what gives a cause, or a remedy, its place."""
    shown = "\n".join((*_when(finding.step), *_entries(finding.evidence)))
    loudest = finding.evidence.get(_LOUDEST.replace(" ", "_"))

    def place(text: str) -> int:
        known = _TAGS.match(text)
        tags = _TAG.findall(known[0]) if known else []
        if loudest and _LOUDEST in tags:
            return -1
        fits = any(
            tag in shown and re.search(rf"\b{re.escape(tag)}(_forward|2_d|2d_forward)?\b", shown) for tag in tags
        )
        return [_OF_OTHERS if tags else _OF_ALL, 2, 1, 0][2 * (finding.phase in tags) + fits]

    return place


def untagged(text: str) -> str:
    """Return a cause or a remedy without its tags."""
    return text[known.end() :] if (known := _TAGS.match(text)) else text


def _when(step: int | None) -> tuple[str, ...]:
    return () if step is None else ("later" if step else "from the start",)


def _entries(evidence: Mapping[str, Any]) -> Iterator[str]:
    """Yield each name and each text of evidence, but of what is a place, and of what is zero, empty or unknown."""
    for name, value in evidence.items():
        called = name == "operation" and evidence.get("backward_of") and str(value).startswith("aten.")
        if value and name not in _PLACES and not called:  # what a backward is of says more than what it has called
            label = name.replace("_", " ")
            yield label
            yield from (f"{label} {text}" for text in _texts(value))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        value = [*value.values()]
    if isinstance(value, list | tuple):
        for each in value:
            if isinstance(each, Mapping):  # a tensor: how many zeros, nan and inf it holds
                yield from (name for name, count in each.items() if count)
            yield from _texts(each)
    elif isinstance(value, float) and not math.isfinite(value):
        yield str(value)
    elif isinstance(value, str):
        yield _NODE.sub(_operation, _ATEN.sub(r"aten.\1", value))


def _operation(node: re.Match[str]) -> str:
    """Return `sqrt` for `SqrtBackward0`; a node without a number is that of a function of the script's own."""
    return _CAPITAL.sub("_", node[1]).lower() if node[2] else f"{node[0]}, an autograd function"
