"""Parts that the pages of runs and of the preflight share: the head, escaped text, lines of an SVG. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from html import escape

from ddpdebug.sinks.text import clean

#: Up to the rules of the style; `{title}` is to be filled in. The policy forbids scripts and every request, should
#: something have slipped through.
HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:; \
base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
"""


def text(value: object, limit: int = 300) -> str:
    """Return a value as HTML on one line of at most `limit` characters; nothing for None."""
    return escape(clean("" if value is None else value, limit))


def path(places: Iterable[tuple[float, float]]) -> str:
    """Return the `d` of an SVG path through points in pixels; one that is not finite leaves a gap."""
    words, pen = [], "M"
    for x, y in places:
        if not (math.isfinite(x) and math.isfinite(y)):
            pen = "M"
            continue
        words.append(f"{pen}{x:.1f} {y:.1f}")
        words += ["h0.1"] if pen == "M" else []  # a lone point shows
        pen = "L"
    return "".join(words)
