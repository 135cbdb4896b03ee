"""Detection of the script's import of torch. Loads nothing, so that settings which the script makes before it count.

An entry of `sys.meta_path` waits for the import of a module, whoever imports it, and is gone once that has happened.
The loader that it finds is the module's own; only its `exec_module` is another one, once.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import FunctionType, ModuleType
    from typing import Any


class ImportWatch:
    """Calls a function as soon as a module is loaded; at once if it is loaded already.

    Args:
        name: of a module that is in no package.
        then: called once, in the thread that imports, before the import returns.
    """

    def __init__(self, name: str, then: Callable[[], object]) -> None:
        self._name, self._then = name, then
        self._is_over = False

    def start(self) -> None:
        """Start to wait for the import."""
        if self._name in sys.modules:
            self._arrive()
        else:
            self._insert()

    def stop(self) -> None:
        """Stop waiting for the import."""
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        """Return the spec that the later finders return for the module; None for all other modules."""
        if name != self._name or self not in sys.meta_path:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            find = getattr(finder, "find_spec", None)
            spec = None if find is None else find(name, path, target)
            if spec is not None:
                self._watch(spec)
                return spec
        return None

    def _insert(self) -> None:
        """Stand before the finder of files, not first: where few look."""
        kinds = [getattr(finder, "__name__", "") for finder in sys.meta_path]
        at = kinds.index("PathFinder") if "PathFinder" in kinds else 0
        sys.meta_path.insert(at, self)

    def _watch(self, spec: ModuleSpec) -> None:
        loader: Any = spec.loader
        original = getattr(loader, "exec_module", None)
        if original is None or isinstance(loader, type) or not hasattr(loader, "__dict__"):
            return

        def exec_module(module: ModuleType) -> object:
            if module.__name__ != watched:  # a loader of several modules
                return original(module)
            loader.__dict__.pop("exec_module", None)
            stop()
            try:
                original(module)
            except BaseException:
                insert()  # who catches it may try again
                raise
            return arrive()

        watched, stop, insert, arrive = self._name, self.stop, self._insert, self._arrive
        loader.exec_module = _as_of_importlib(exec_module)

    def _arrive(self) -> None:
        self.stop()
        if not self._is_over:
            self._is_over = True
            self._then()


def _as_of_importlib(function: Callable[..., object]) -> FunctionType:
    """Let tracebacks and warnings take the function's frame for one of the import system, which they leave out."""
    made: Any = function
    code = made.__code__
    made.__code__ = code.replace(co_filename="<frozen importlib._bootstrap_external>")
    return made  # type: ignore[no-any-return]
