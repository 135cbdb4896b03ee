"""Ours find what is installed, and the script finds what it would find without us."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

_SCRIPT = """
import random, sys
before = []
random.seed(1); state = random.getstate()
sys.modules.pop("statistics", None)
import html
from ddpdebug.isolation.own_imports import OwnImports
path, modules = sys.path[:], set(sys.modules)
for _ in range(2):
    with OwnImports():
        import html as ours, statistics, shlex, fractions, colorsys
        before.append([ours, statistics, fractions, colorsys])
        random.random()
    assert sys.path == path and random.getstate() == state
assert all(a is b for a, b in zip(*before)), before
assert not hasattr(ours, "WHOSE") and ours.escape("<") == "&lt;" and statistics.median([1]) == 1
assert sys.modules["html"] is html and html.WHOSE == "mine", sys.modules["html"]
assert "statistics" not in sys.modules and "html.entities" not in sys.modules
assert sys.modules["colorsys"] is colorsys  # the script would find the same
import statistics as theirs, html.more
assert theirs.WHOSE == html.more.WHOSE == "mine"
with OwnImports():
    import html.entities as entities, statistics as again
    assert again is statistics
assert sys.modules["statistics"] is theirs and sys.modules["html"] is html and "html.entities" not in sys.modules
print("done")
"""


def test_both_find_their_own(tmp_path: Path) -> None:
    """Modules beside the script, of names of the standard library, before and after ours have been imported."""
    (tmp_path / "html").mkdir()
    for name in ("html/__init__", "html/more", "statistics", "fractions"):
        (tmp_path / f"{name}.py").write_text("WHOSE = 'mine'\n")
    (tmp_path / "script.py").write_text(_SCRIPT)
    words = [sys.executable, str(tmp_path / "script.py")]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_what_is_needed_is_named() -> None:
    """The packages that this one depends on are among those that are put aside."""
    from importlib.metadata import requires

    from ddpdebug.isolation.own_imports import _NEEDED

    names = {"prometheus-client": "prometheus_client"}
    needed = {line.partition(";")[0] for line in requires("ddpdebug") or [] if "extra ==" not in line}
    plain = {name.split(">")[0].split("=")[0].split("<")[0].strip() for name in needed}
    assert {names.get(name, name) for name in plain} - {"torch", "numpy"} <= _NEEDED, json.dumps(sorted(plain))
