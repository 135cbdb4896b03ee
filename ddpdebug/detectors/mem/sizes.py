"""Sizes of memory, for people."""

from __future__ import annotations

MIB = 1 << 20
GIB = 1 << 30


def size_text(value: float) -> str:
    """Return bytes as people read them."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (1 << 10, "KiB")):
        if abs(value) >= unit:
            return f"{value / unit:.3g} {name}" if abs(value) < 1000 * unit else f"{value / unit:.0f} {name}"
    return f"{value:.0f} bytes"
