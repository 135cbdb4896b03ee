"""Imports of ddpdebug in the script's process: they find installed modules, and the script finds its own.

A script's folder stands first on `sys.path`, and may hold a `click.py` or `html.py` of its own. While ours are imported
the installed modules come first, and what the script has loaded under their names is put aside. What ours have loaded
stays in `sys.modules` only where the script would find the same; else it is kept here for our next imports.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from types import ModuleType

#: What we need besides the standard library, and what that needs in turn.
_NEEDED = frozenset({"click", "markdown_it", "mdurl", "prometheus_client", "pygments", "rich", "safetensors", "xxhash"})
_NAMES = _NEEDED | sys.stdlib_module_names
_STDLIB = os.path.dirname(os.__file__)  # noqa: PTH120 - pathlib need not be loaded
#: Modules of ours that the script would find elsewhere.
_HIDDEN: dict[str, ModuleType] = {}


class OwnImports:
    """A context for ddpdebug's imports; Python's global random state is restored afterwards."""

    def __enter__(self) -> None:
        random = sys.modules.get("random")
        self._random = random, getattr(random, "getstate", lambda: None)()
        others = {name for name, module in tuple(sys.modules.items()) if name in _NAMES and not _is_installed(module)}
        self._theirs = {name: sys.modules.pop(name) for name in tuple(sys.modules) if _top(name) in others}
        sys.modules.update(_HIDDEN)
        self._before = frozenset(sys.modules)
        self._path = sys.path[:]
        sys.path[:] = sorted(self._path, key=lambda entry: not _is_for_installed(entry))

    def __exit__(self, *_: object) -> None:
        sys.path[:] = self._path
        ours = [name for name in tuple(sys.modules) if name not in self._before and _top(name) in _NAMES]
        others = {top for top in map(_top, ours) if _finds_another(top)}
        _HIDDEN.update({name: sys.modules[name] for name in ours if _top(name) in others})
        for name in _HIDDEN:
            sys.modules.pop(name, None)
        sys.modules.update(self._theirs)
        random, state = self._random
        if random is not None and state is not None:
            random.setstate(state)


def _top(name: str) -> str:
    return name.partition(".")[0]


def _is_installed(module: ModuleType) -> bool:
    """Whether a module is of the standard library or of a folder of installed packages."""
    file = getattr(module, "__file__", None)
    if not isinstance(file, str):
        return True  # built in, frozen, or made by hand
    folder, name = os.path.split(file)
    return _is_for_installed(os.path.dirname(folder) if name.startswith("__init__.") else folder)  # noqa: PTH120


def _is_for_installed(entry: str) -> bool:
    """Whether an entry of `sys.path` is one of those."""
    folder, name = os.path.split(os.path.normpath(entry))
    is_stdlib = os.path.join(folder, name) == _STDLIB or (folder == _STDLIB and name == "lib-dynload")  # noqa: PTH118
    return is_stdlib or name in {"site-packages", "dist-packages"} or (name[:6] == "python" and name[-4:] == ".zip")


def _finds_another(name: str) -> bool:
    """Whether the script would find another module under a name than the one that is loaded."""
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None or getattr(getattr(sys.modules[name], "__spec__", None), "origin", None) == "frozen":
        return False
    spec = PathFinder.find_spec(name)
    return spec is not None and spec.origin not in {None, file}
