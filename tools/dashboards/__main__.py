"""Writes the dashboards into the folder that is named."""

from __future__ import annotations

import sys
from pathlib import Path

from tools.dashboards import built

for name, text in built().items():
    (Path(sys.argv[1]) / name).write_text(text, encoding="utf-8")
