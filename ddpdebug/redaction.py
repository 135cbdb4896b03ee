"""Redaction of secrets in command lines and in the texts that may quote them. Torch-free.

Too much is hidden rather than too little: of an option that looks secret the run directory says that it was given.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

HIDDEN = "***"

#: Words in the name of an option or variable whose value is always hidden, ...
_STRONG = frozenset(
    {
        *("password", "passwords", "passwd", "passphrase", "passcode", "pwd", "secret", "secrets", "dsn", "sas"),
        *("apikey", "apikeys", "credential", "credentials", "cookie", "cookies", "webhook", "webhooks"),
        *("authorization", "bearer"),
    }
)
#: ... and those whose value is hidden unless it is a short number or a switch: `--max-tokens 512`, `--key-dim 64`.
_WEAK = frozenset({"key", "keys", "token", "tokens", "auth", "oauth", "jwt", "pat", "pass", "login", "signature"})
#: Two words that are strong together.
_PAIRS = frozenset({("api", "key"), ("access", "key"), ("private", "key"), ("secret", "key"), ("api", "token")})
#: A name that ends so holds a place or a kind, not the secret itself.
_HARMLESS_END = frozenset({"file", "path", "dir", "directory", "name", "type", "len", "length", "size", "dim"})
_PLAIN = re.compile(
    r"[+-]?(?:\d{1,8}|\d{0,8}\.\d{1,16}|\d{1,4}(?:\.\d*)?e[+-]?\d{1,3})|true|false|none|null", re.IGNORECASE
)
_PIECES = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")

#: Tokens that are known by their shape, wherever they stand.
_SHAPES = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    r"hf_[A-Za-z0-9]{16,}|api_org_[A-Za-z0-9]{16,}"
    r"|sk-[A-Za-z0-9_-]{16,}|[rs]k_(?:live|test)_[A-Za-z0-9]{10,}"
    r"|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}|glpat-[A-Za-z0-9_-]{16,}"
    r"|(?:AKIA|ASIA|AROA|AIDA)[A-Z0-9]{12,}|AIza[A-Za-z0-9_-]{30,}|ya29\.[A-Za-z0-9_-]{16,}"
    r"|xox[abeoprs]-[A-Za-z0-9-]{10,}|xapp-[A-Za-z0-9-]{10,}|glsa_[A-Za-z0-9_]{20,}|dop_v1_[a-f0-9]{40,}"
    r"|npm_[A-Za-z0-9]{30,}|pypi-[A-Za-z0-9_-]{30,}|SG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}"
    r"|eyJ[A-Za-z0-9_-]{6,}\.[A-Za-z0-9_-]{4,}(?:\.[A-Za-z0-9_-]*)?"
    r")"
)
_HEADER = re.compile(r"\b(bearer|basic|token)(\s+)([A-Za-z0-9._~+/=-]{8,})", re.IGNORECASE)
_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)
_URL_USER = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,30}://)([^\s/?#'\"]+)@")
_SERVICE_HOOK = re.compile(
    r"(https?://(?:hooks\.slack\.com|discord(?:app)?\.com/api/webhooks|[\w.-]*webhook\.office\.com))[^\s'\"]*",
    re.IGNORECASE,
)
#: `name=value`, `name: value`, `"name": "value"`; the value may be quoted.
_ASSIGNED = re.compile(r"""([A-Za-z_][\w.\-]*)\\?["']?\s*(?:=|:)\s*""")
_VALUE = re.compile(r""""(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[^\s,;&}\])"']+""")
#: Long words of one piece, as generators of tokens make them; no path, no sentence.
_LONG = re.compile(r"(?<![\w/+.=-])[A-Za-z0-9_+/=-]{32,}(?![\w/+.=-])")
_LEAST_LEARNT = 6
_NO_TEXT = frozenset({bool, float, int, type(None)})
_ENTROPY = 3.7  # bits a letter, of which random base64 of 32 letters has 4.4, and names of runs with words have less
_PLURALS = ("keys", "tokens", "secrets", "passwords", "credentials", "cookies", "webhooks")


def redact(words: Sequence[str]) -> list[str]:
    """Return a command line with `***` in place of the values that look secret."""
    return Redactor(words).words


class Redactor:
    """A filter for texts: replaces tokens by their shape, and the secrets of one command line wherever they are quoted.

    Args:
        command: the command line, as the process got it.
    """

    def __init__(self, command: Sequence[str] = ()) -> None:
        self._learnt: set[str] = set()
        self.words = list(self._line([str(word) for word in command]))
        known = sorted(self._learnt, key=lambda secret: (-len(secret), secret))
        self._known = re.compile("|".join(map(re.escape, known))) if known else None

    def text(self, text: str) -> str:
        """Return a text without the secrets of the command line, and without words that look like tokens."""
        if self._known is not None:
            text = self._known.sub(HIDDEN, text)
        return _assigned(_shaped(text), strict=True) if _SUSPICIOUS.search(text) else text

    def value(self, value: Any) -> Any:
        """Return a JSON value with `text` applied to all of its texts; the same object if nothing was hidden."""
        if type(value) in _NO_TEXT:  # most of what is written are numbers
            return value
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict | Mapping):  # its keys are names of ours, and of parameters
            hidden = self._hidden(value.items())
            return {**value, **hidden} if hidden else value
        if isinstance(value, list | tuple):
            changes = self._hidden(enumerate(value))
            found = [changes.get(place, item) for place, item in enumerate(value)] if changes else value
            return tuple(found) if isinstance(value, tuple) and changes else found
        return value

    def _hidden(self, items: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
        """Return what differs from the items without secrets, by key or place."""
        look = ((key, item, self.value(item)) for key, item in items if type(item) not in _NO_TEXT)
        return {key: new for key, item, new in look if new is not item}

    def _line(self, words: Sequence[str]) -> Iterator[str]:
        waiting = ""  # the option whose value comes next
        for word in words:
            if waiting and not _is_option(word, _kind(waiting)):
                hidden = _is_secret(waiting, word)
                if hidden:
                    self._learn_value(waiting, word)
                yield HIDDEN if hidden else self._word(word)
                waiting = waiting if waiting.lower().endswith(_PLURALS) else ""  # `--api-keys A B`
                continue
            name = word.lstrip("-+")
            waiting = name if word.startswith("-") and "=" not in word and _kind(name) else ""
            yield self._word(word)

    def _word(self, word: str) -> str:
        name, sign, value = word.partition("=")
        if sign and _is_secret(name.lstrip("-+~"), value):
            self._learn_value(name, value)
            return f"{name}={HIDDEN}"
        shown = _LONG.sub(_random, _assigned(_shaped(word, self._learn), self._learn_value, strict=False))
        if shown != word:
            for match in _LONG.finditer(word):
                if _random(match) == HIDDEN:
                    self._learn(match[0])
        return shown

    def _learn_value(self, name: str, value: str) -> None:
        """Hide a value in other texts too, unless it is a common word there, like that of `--text-key inputs`."""
        mixed = re.search(r"\d", value) and re.search(r"[A-Za-z]", value)
        if _kind(name) == "strong" or (mixed and len(value) > _LEAST_LEARNT):
            self._learn(value)

    def _learn(self, secret: str) -> None:
        for part in {secret, secret.strip("\"'")}:
            if len(part) >= _LEAST_LEARNT:
                self._learnt.add(part)


#: Whether a text may hold a secret at all: most do not, and this is what they pay.
_SUSPICIOUS = re.compile(
    r"://|(?:hf|org|live|test|gh.|pat|glsa|npm|v1)_|(?:k|glpat|xox.|xapp|pypi)-|A[KSRI][IOD]A|AIza|ya29|SG\.|eyJ|BEGIN"
    r"|bearer|basic|token|pass|pwd|secret|key|cred|cookie|hook|auth|dsn|sas",
    re.IGNORECASE,
)


def _is_option(word: str, kind: str) -> bool:
    """Return whether a word begins the next option; a password may look like a short one."""
    return word.startswith("--") or (kind == "weak" and bool(re.fullmatch(r"-[A-Za-z]", word)))


def _kind(name: str) -> str:
    """Return `strong`, `weak` or nothing: how much the name of an option or variable speaks for a secret."""
    words = [piece.lower() for piece in _PIECES.findall(name)]
    if not words or words[-1] in _HARMLESS_END:
        return ""
    if _STRONG.intersection(words) or _PAIRS.intersection(pairwise(words)):
        return "strong"
    return "weak" if _WEAK.intersection(words) else ""


def _is_secret(name: str, value: str) -> bool:
    kind = _kind(name)
    bare = value.strip("\"'")
    if not kind or not bare or bare == HIDDEN:
        return False
    return kind == "strong" or not _PLAIN.fullmatch(bare)


def _shaped(text: str, learn: Any = None) -> str:
    """Hide what is known by its shape, and the user part of addresses."""

    def hide(match: re.Match[str]) -> str:
        if learn is not None:
            learn(match[0])
        return HIDDEN

    def hide_user(match: re.Match[str]) -> str:
        if learn is not None:
            learn(match[2])
            learn(match[2].partition(":")[2])
        return f"{match[1]}{HIDDEN}@"

    def hide_header(match: re.Match[str]) -> str:
        if _PLAIN.fullmatch(match[3]) or not (re.search(r"[\d+/=._~-]", match[3]) or match[1].lower() == "bearer"):
            return match[0]  # "token embedding"
        if learn is not None:
            learn(match[3])
        return f"{match[1]}{match[2]}{HIDDEN}"

    text = _PRIVATE_KEY.sub(hide, text)
    text = _URL_USER.sub(hide_user, text)
    text = _SERVICE_HOOK.sub(lambda match: (learn and learn(match[0])) or f"{match[1]}/{HIDDEN}", text)
    return _HEADER.sub(hide_header, _SHAPES.sub(hide, text))


def _assigned(text: str, learn: Any = None, *, strict: bool) -> str:
    """Hide the values of assignments in a text; `strict` takes only names that leave no doubt, in prose."""
    parts, done = [], 0
    for match in _ASSIGNED.finditer(text):
        name, value = match[1], _VALUE.match(text, match.end())
        if value is None or match.start() < done or not _is_secret(name, value[0]):
            continue
        if strict and _kind(name) != "strong":
            continue
        if learn is not None:
            learn(name, value[0].strip("\"'"))
        quote = value[0][0] if value[0][0] in "\"'" else ""
        parts += [text[done : match.end()], quote, HIDDEN, quote]
        done = value.end()
    return "".join([*parts, text[done:]])


def _random(match: re.Match[str]) -> str:
    """Hide a long word of hexadecimal digits, or one that is as mixed as only random ones are."""
    word = match[0]
    if not (re.search(r"\d", word) and re.search(r"[A-Za-z]", word)) or word.count("/") > 2:
        return word
    if re.fullmatch(r"[0-9a-fA-F]+", word):
        return HIDDEN
    counts = Counter(word)
    entropy = -sum(n / len(word) * math.log2(n / len(word)) for n in counts.values())
    return HIDDEN if entropy >= _ENTROPY else word
