"""Findings as text for the terminal and for reports: numbers, ranks, places and evidence. Torch-free.

Everything that came from the job (names, messages, values) passes through `clean`: a parameter may be called anything.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ddpdebug.errors import essence
from ddpdebug.schema.finding import UNDECIDED, Finding, Severity
from ddpdebug.schema.likeliest import fitting, untagged
from ddpdebug.schema.progress import ranks_in
from ddpdebug.sinks.words import MAX_NAME, MAX_VALUE, clean, counted, culprits_text, number, ranks_text

SEPARATOR = " · "
_MAX_SUBJECTS = 3
_MAX_EVIDENCE = 6
_MAX_GROUPS = 4
_MAX_ITEMS = 6
_MAX_CAUSES = 2
_MAX_TENSORS = 4
#: What a terminal shows of a finding below its title, and of its evidence.
_MAX_LINES, _MAX_FIGURES, _MAX_LISTED = 7, 2, 4
#: Evidence that is lists of ranks, and that is positions and sizes of tensors.
_OF_RANKS = frozenset({"changed_on", "not_at_its_end", "ranks", "fed_alike"})
_OF_INDEX = frozenset({"index", "shape", "prediction", "target", "averaged_over"})
#: Tables by something else than the rank, although their keys are numbers.
_OF_DEPTH = frozenset({"std_by_depth", "std_between_inputs"})
#: A label that goes on in its value: `agreed after step 19`, but `level: 3.4`.
_GOES_ON = re.compile(r"(?:^| )(?:after|at|by|from|in|of|on|step|to|with)$")
#: What says nothing at a glance: digests, how much was looked at, and what has followed.
_LONG = frozenset(
    {
        "digests",
        "bytes_per_step",
        "cost_seconds",
        "keys",
        "share",
        "states",
        "steps_before_the_second_pass",
        "samples",
        "consequences",
        "stacks",
        "loader",
        "instead",
        "parameters",
        "also_differing",
        "optimizer",
        "wrapper",
    }
)
_DIGEST = re.compile(r"\b[0-9a-f]{8}(?:[0-9a-f]{8})?\b")
#: Evidence that is the text of an error: on a line of its own, as people search for it.
_ERRORS, _MAX_ERROR = ("error", "their_error"), 400
_MAX_PATH = 4096
#: The evidence that is a command, not a text: a bundle that can be replayed.
BUNDLE = "bundle"
#: The evidence by which a hang is found again; it means nothing to people.
HANG = "hang"
#: The evidence that it is over, seconds.
ENDED = "ended_after_seconds"
#: What is not told as the other evidence is.
_APART = frozenset({BUNDLE, UNDECIDED, HANG})
_OF_ELEMENT = frozenset({"index", "element_of", "values", "values_at_step", "flipped_bits", "dtype"})
_MAX_LINE = 240
#: Lines of a stack that are shown, the innermost ones, of the user's own; files that are not.
_MAX_FRAMES = 3
_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib/python3|/torch/|^<")
_DIFFERENCES = {
    "order": "they wait for each other: groups or collectives in another order",
    "unknown": "all are in the same call, and it does not end",
}

#: A labelled part of a block: the label and its lines.
Part = tuple[str, list[str]]


def where(finding: Finding, world: int | None = None) -> str:
    """Return step, ranks, phase and location of a finding, as far as known."""
    parts = []
    if finding.step is not None:
        parts.append(f"step {finding.step}")
    if finding.ranks:
        parts.append(culprits_text(finding, world))
    parts += [clean(part, MAX_NAME) for part in (finding.phase, finding.location) if part]
    return SEPARATOR.join(parts)


def subjects(finding: Finding) -> list[str]:
    """Return the first subjects of a finding, and the number of further ones."""
    shown = [clean(name, MAX_NAME) for name in finding.subject[:_MAX_SUBJECTS]]
    names = [f"module `{name}`" if name.isdecimal() else name for name in shown]
    more = len(finding.subject) - len(names)
    return [*names, f"and {more} more"] if more else names


def evidence_lines(evidence: Mapping[str, Any]) -> list[str]:
    """Return the evidence as lines: short values together, values by rank on lines of their own."""
    if HANG in evidence:
        return [
            f"{label}: {line}" if i == 0 else line
            for label, lines in hang_parts(evidence)
            for i, line in enumerate(lines)
        ]
    element = element_text(evidence)
    short, long = list[str](), list[str]() if element is None else [element]
    apart = _APART if element is None else _APART | _OF_ELEMENT
    shown = {k: v for k, v in evidence.items() if k not in apart and v is not None and v not in ({}, [], "")}
    if (sides := evidence.get(UNDECIDED)) and _are_ranks(sides):
        short.append(_against(sides))
    for key, value in list(shown.items())[:_MAX_EVIDENCE]:
        label = _label(key)
        if key in _ERRORS and isinstance(value, str):
            long.append(f"{label}: {clean(value, _MAX_ERROR)}")
        elif _is_by_rank(value) and key not in _OF_DEPTH:
            long.append(f"{label}: {_by_rank(value)}")
        elif isinstance(value, list) and any(map(_is_tensor, value)):
            long += [f"{label}: {_value(item)}" for item in value[:_MAX_TENSORS]]
        else:
            short.append(_labelled(key, value))
    more = len(shown) - _MAX_EVIDENCE
    tail = [f"and {more} more in the run directory"] if more > 0 else []
    return ([SEPARATOR.join(short)] if short else []) + long + tail


def _against(sides: Sequence[Sequence[int]]) -> str:
    alone = len(sides) > 2 and all(len(side) == 1 for side in sides)
    return (
        f"no two of {ranks_text(rank for side in sides for rank in side)} agree"
        if alone
        else " against ".join(map(ranks_text, sides))
    )


def _are_ranks(sides: object) -> bool:
    """Whether a value, of a file that may be damaged, is groups of ranks."""
    groups = sides if isinstance(sides, list | tuple) else [None]
    return all(isinstance(side, list | tuple) and all(type(rank) is int for rank in side) for side in groups)


def hang_parts(evidence: Mapping[str, Any]) -> list[Part]:
    """Return the evidence of a hang: missing ranks, waiting ranks, their calls, and the place of every rank."""
    tables = {name: _texts(evidence.get(name)) for name in ("missing", "waiting", "calls")}
    difference, seconds = evidence.get("difference"), evidence.get("waited_seconds")
    waits = _aligned(tables["waiting"])
    if waits and isinstance(seconds, int | float):
        waits.append(f"for {seconds:.0f} s when this was found")
    calls = _aligned(tables["calls"])
    if calls and isinstance(difference, str):
        calls.insert(0, _DIFFERENCES.get(difference, f"they differ in the {clean(difference, 60)}"))
    counts = evidence.get("collectives_so_far")
    over = evidence.get(ENDED)
    told = {*tables, "where", "difference", "waited_seconds", "collectives_so_far", "stacks", ENDED, HANG}
    rest = {name: value for name, value in evidence.items() if name not in told}
    found = [
        ("missing", [f"{ranks_of(ranks)}: {text}" for ranks, text in tables["missing"].items()]),
        ("calls", calls),
        # what was called says it already
        ("waits", [] if calls and {*tables["waiting"].values()} <= {*tables["calls"].values()} else waits),
        (
            "so far",
            [f"collectives of {_by_rank(counts)}"] if isinstance(counts, Mapping) and _is_by_rank(counts) else [],
        ),
        ("stacks", _stacks(evidence.get("stacks"), " ".join([*tables["missing"].values(), *waits, *calls]))),
        ("evidence", evidence_lines(rest)),
        ("over", [f"after {over:.0f} s"] if isinstance(over, int | float) else []),
    ]
    return [(label, lines) for label, lines in found if lines]


def ranks_of(text: str) -> str:
    """Return `ranks_text` of a text such as `0-3,7`, even if it is malformed."""
    try:
        return ranks_text(ranks_in(text))
    except ValueError:
        return f"ranks {clean(text, 60)}"


def _texts(table: object) -> dict[str, str]:
    """Return ranks -> words, of a file that may be damaged; the first ones."""
    items = list(table.items()) if isinstance(table, Mapping) else []
    return {str(ranks): clean(text, _MAX_LINE) for ranks, text in items[:_MAX_ITEMS]}


def _aligned(calls: Mapping[str, str]) -> list[str]:
    """Return calls below each other: ranks, what was called, and the line."""
    cut = [(f"{ranks_of(ranks)}:", *text.partition(" at ")) for ranks, text in calls.items()]
    wide = [max((len(row[i]) for row in cut), default=0) for i in (0, 1)]
    return [f"{who:{wide[0]}} {what:{wide[1]}}{at}{place}".rstrip() for who, what, at, place in cut]


def _stacks(groups: object, told: str) -> list[str]:
    """Return the user's innermost lines of each group of ranks, where these say more than was shown already."""
    found = []
    for ranks, frames in list(groups.items())[:_MAX_ITEMS] if isinstance(groups, Mapping) else ():
        known = (
            [clean(frame, MAX_NAME) for frame in frames if isinstance(frame, str)] if isinstance(frames, list) else []
        )
        own = [frame for frame in known if not _LIBRARY.search(frame) and "(<module>)" not in frame][:_MAX_FRAMES]
        if len(own) > 1 or any(frame.partition(" ")[0] not in told for frame in own):
            # the file's name is enough: the whole path of the innermost line stands above
            found.append(f"{ranks_of(str(ranks))}: {' < '.join(frame.rpartition('/')[2] for frame in own)}")
    return [*found, "whole in findings.jsonl"] if found else []


def parts(finding: Finding, world: int | None = None) -> list[Part]:
    """Return the labelled lines of a finding after its title, from place to remedy, without empty parts."""
    explain = f"ddpdebug explain {clean(finding.code, 20)}"
    brief = finding.severity is Severity.INFO
    causes, actions = ([], []) if brief else fitting(finding)
    causes = [clean(cause, 400) for cause in causes[:_MAX_CAUSES]]
    actions = [clean(action, 400) for action in actions[:1]]
    bundle = finding.evidence.get(BUNDLE)
    replay = [f"ddpdebug replay {clean(bundle, _MAX_PATH)}"] if isinstance(bundle, str) and not brief else []
    found = [
        ("where", [where(finding, world)]),
        ("what", subjects(finding)),
        *(
            hang_parts(finding.evidence)
            if HANG in finding.evidence
            else [("evidence", evidence_lines(finding.evidence))]
        ),
        ("perhaps", [f"{i}. {cause}" for i, cause in enumerate(causes, 1)] if len(causes) > 1 else causes),
        ("next", [*actions, *replay, explain]),
    ]
    return [(label, lines) for label, lines in found if any(lines)]


def brief(finding: Finding, world: int | None = None) -> list[Part]:
    """Return the lines of a finding for a terminal, seven at most; `parts` and `ddpdebug explain` have the rest."""
    whole = dict(parts(finding, world))
    upon = whole.get("next", [])
    next_ = [*upon[:1], *upon[-1:]] if len(upon) > 2 and BUNDLE not in finding.evidence else upon
    found: list[Part] = [("where", [where(finding, world)]), ("what", [", ".join(whole.get("what", []))])]
    left = _MAX_LINES - sum(bool(lines[0]) for _, lines in found) - len(next_)
    if HANG in finding.evidence:
        for label, lines in hang_parts(finding.evidence):
            if label in {"missing", "calls", "waits"} and left > 0:
                found.append((label, lines[:left]))
                left -= len(lines[:left])
    elif figures := _figures(finding, world):
        found.append(("evidence", [SEPARATOR.join(figures)]))
        left -= 1
    if "perhaps" in whole and left > 0:
        found.append(("perhaps", [first_cause(finding)]))
    return [(label, lines) for label, lines in [*found, ("next", next_)] if any(lines)]


def first_cause(finding: Finding) -> str:
    """Return the likeliest cause, without its phase."""
    return clean(untagged(finding.causes[0]), 400) if finding.causes else ""


def _figures(finding: Finding, world: int | None) -> list[str]:
    """Return the one or two that say most: the text of an error, the element that differs, what differs by rank."""
    evidence = finding.evidence
    if (element := element_text(evidence)) is not None:
        return [element]
    sides, found = evidence.get(UNDECIDED), list[str]()
    if sides and _are_ranks(sides) and (world or 0) > 2 and any(len(side) > 1 for side in sides):
        found.append(_against(sides))
    errors = [clean(essence(str(evidence[key])), _MAX_LINE) for key in _ERRORS if evidence.get(key)]
    plain = {
        key: value
        for key, value in evidence.items()
        if key not in _APART | _LONG | _OF_DEPTH
        and key not in _ERRORS
        and value not in (None, "", finding.phase)
        and not (isinstance(value, str) and value in finding.title)
    }
    observed = plain.pop("observed", None)
    told = [clean(observed, _MAX_LINE)] if isinstance(observed, str) else []
    plain = {key: _other_than(finding.phase, value) for key, value in plain.items()}
    first = sorted(plain.items(), key=lambda item: 0 if item[0] == "operation" else 1 if _is_table(item[1]) else 2)
    simple = (_simple(key, value) for key, value in first)
    return [*told, *errors, *found, *filter(None, simple)][:_MAX_FIGURES]


def _other_than(phase: str | None, value: Any) -> Any:
    """Return a table without what says of each thing what the phase says of all."""
    return {key: one for key, one in value.items() if one != phase} if isinstance(value, Mapping) else value


def _is_table(value: object) -> bool:
    """Return whether a value is of each rank, or of tensors: these say more than single numbers."""
    return _is_by_rank(value) or (isinstance(value, list) and any(map(_is_tensor, value)))


def _simple(key: str, value: Any) -> str:
    """Return a figure that is read at a glance; empty where the value is a list of tables, or digests."""
    label = _label(key)
    if _is_by_rank(value):
        first = {rank: _first_two(one) if isinstance(one, Mapping) else one for rank, one in value.items()}
        text = "" if any(isinstance(one, list) for one in first.values()) else _by_rank(first)
        return "" if _DIGEST.search(text) else f"{label}: {text}" * bool(text)
    if isinstance(value, Mapping):
        inner = next((one for one in value.values() if isinstance(one, Mapping)), value)
        return SEPARATOR.join(_labelled(str(name), one) for name, one in _first_two(inner).items())
    if isinstance(value, list) and value and _is_tensor(value[0]):
        return f"{label}: {_value(value[0])}"
    if isinstance(value, list | tuple):
        plain = all(isinstance(item, str | int | float) for item in value)
        return _labelled(key, value) if plain and 0 < len(value) <= _MAX_LISTED else ""
    return _labelled(key, value)


def _first_two(table: Mapping[Any, Any]) -> dict[Any, Any]:
    return dict([(key, one) for key, one in table.items() if isinstance(one, int | float | str)][:2])


def _labelled(key: str, value: Any) -> str:
    label = _label(key)
    return f"{label}{'' if _GOES_ON.search(label) else ':'} {_figure(key, value)}"


def _figure(key: str, value: Any) -> str:
    if key in _OF_RANKS and isinstance(value, list | tuple) and all(type(rank) is int for rank in value):
        return ranks_text(value)
    return f"[{_value(value)}]" if key in _OF_INDEX and isinstance(value, list | tuple) else _value(value)


def element_text(evidence: Mapping[str, Any]) -> str | None:
    """Return the first differing element, its values, and the bits that differ; None if unknown.

    `0.weight[3, 4]: rank 0 = 0.0131, rank 2 = 858.7 after step 61 (bit 27 of float32 is flipped)`.
    """
    values, index = evidence.get("values"), evidence.get("index")
    if not isinstance(values, Mapping) or not _is_by_rank(values) or not isinstance(index, list):
        return None
    name, at = clean(evidence.get("element_of", "element"), MAX_NAME), evidence.get("values_at_step")
    text = f"{name}[{_value(index)}]: {_by_rank(values)}" + (f" after step {at}" if isinstance(at, int) else "")
    return f"{text} ({bits})" if (bits := bits_text(evidence)) else text


def bits_text(evidence: Mapping[str, Any]) -> str:
    """Return `bit 27 of float32 is flipped`; empty if the values do not differ by single bits."""
    bits = evidence.get("flipped_bits")
    if not isinstance(bits, list) or not bits:
        return ""
    kind, one = clean(evidence.get("dtype", "the element"), 30), len(bits) == 1
    return f"bit{'' if one else 's'} {_value(bits)} of {kind} {'is' if one else 'are'} flipped"


def tensor_text(value: Mapping[str, Any], separator: str = ", ") -> str:
    """Return a recorded tensor on one line: `float32 [3, 4], 0 to 2.5, 7 zeros`, after its name if there is one."""
    kind = clean(value.get("dtype", "tensor"), 30)
    parts = [f"{kind} {clean(value.get('shape'), 60)}"]
    if 0 in value.get("shape", ()):
        parts.append("empty")
    if (low := value.get("min")) is not None and (high := value.get("max")) is not None:
        parts.append(_value(low) if low == high else f"{_value(low)} to {_value(high)}")
    counts = [(value.get(name), name) for name in ("zeros", "nan", "inf")]
    parts += [
        f"{_value(count)} {'zero' if name == 'zeros' and count == 1 else name}" for count, name in counts if count
    ]
    name = f"{clean(value['name'], 60)} = " if value.get("name") else ""
    return name + separator.join(parts)


def findings_text(findings: Collection[Finding]) -> str:
    """Return `1 critical (RANK101), 2 warning (SYNC207 x2)`, the gravest first."""
    if not findings:
        return "no findings"
    texts = []
    for severity in sorted(Severity, reverse=True):
        codes = Counter(clean(finding.code, 20) for finding in findings if finding.severity is severity)
        names = [code if count == 1 else f"{code} x{count}" for code, count in codes.items()]
        if names:
            texts.append(f"{sum(codes.values())} {severity.label} ({', '.join(names)})")
    return ", ".join(texts)


def _is_tensor(value: object) -> bool:
    """Return whether a value is the summary of a tensor."""
    return isinstance(value, Mapping) and isinstance(value.get("shape"), list)


def _is_by_rank(value: object) -> bool:
    return isinstance(value, Mapping) and bool(value) and all(str(key).isdecimal() for key in value)


def _by_rank(values: Mapping[Any, Any]) -> str:
    """Group the ranks by value; with as many digits as it takes to show that values differ."""
    ranks: dict[str, list[int]] = {}
    for digits in (4, 6, 9, 17):
        ranks = {}
        for rank, value in values.items():
            ranks.setdefault(_value(value, digits), []).append(int(rank))
        if len(ranks) == len({repr(value) for value in values.values()}):
            break
    groups = sorted(ranks.items(), key=lambda group: len(group[1]))  # the odd ones first
    shown = [f"{ranks_text(members)} = {text}" for text, members in groups[:_MAX_GROUPS]]
    more = len(groups) - len(shown)
    return ", ".join(shown) + (f" and {more} more values" if more > 0 else "")


def _value(value: Any, digits: int = 4) -> str:
    if isinstance(value, int | float):
        return number(value, digits)
    if isinstance(value, str):
        return clean(value, MAX_VALUE)
    if isinstance(value, Mapping):
        return _mapping(value, digits)
    if isinstance(value, Sequence):
        return _items(
            [f"({_value(item, digits)})" if isinstance(item, list | tuple) else _value(item, digits) for item in value]
        )
    return clean(value, MAX_VALUE)


def _mapping(value: Mapping[Any, Any], digits: int) -> str:
    if _is_tensor(value):
        return tensor_text(value)
    if "value" in value and value.keys() <= {"name", "value"}:
        return f"{clean(value.get('name', 'the number'), 60)} {_value(value['value'], digits)}"
    return _items([_entry(_label(key), item, digits) for key, item in value.items()])


def _entry(label: str, value: Any, digits: int) -> str:
    text = _value(value, digits)
    if isinstance(value, Mapping):
        return f"{label} ({text})"
    return f"{label}: {text}" if isinstance(value, str) else f"{label} {text}"


def _items(texts: list[str]) -> str:
    return clean(", ".join(texts[:_MAX_ITEMS]) + (", …" if len(texts) > _MAX_ITEMS else ""), 2 * MAX_VALUE)


def _label(key: object) -> str:
    return clean(key, 60).replace("_", " ")


def ignored_texts(counts: Mapping[str, int]) -> list[str]:
    """Return a line for each entry of `ignore`, with the number of findings that it suppressed."""
    return [
        f"{counted(count, 'finding')} ignored by {clean(entry, 200)}"
        if count
        else f"nothing to ignore by {clean(entry, 200)}"
        for entry, count in counts.items()
    ]
