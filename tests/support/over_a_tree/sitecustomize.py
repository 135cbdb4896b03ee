"""Where this folder is on PYTHONPATH, the ranks of each process that loads ddpdebug are very many, however few."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any


class _ManyRanks(PathFinder):
    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Find the module that makes a rank's exchange, and change what it goes by once it is loaded."""
        spec = super().find_spec(name, path, target) if name == "ddpdebug.monitor.monitor" else None
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_become(module: Any) -> None:
            run(module)
            sys.path.append(str(Path(__file__).parent.parent))
            from many_ranks import become_many

            sys.path.pop()
            become_many()

        spec.loader.exec_module = run_and_become  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _ManyRanks)
