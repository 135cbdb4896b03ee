"""The watch over an import: it calls once the module is loaded, whoever loads it, and leaves nothing behind."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddpdebug.processes.torch_import import ImportWatch

_NAME = "watched_module"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of a script's, with the module that is waited for."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", sys.meta_path[:])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / f"{_NAME}.py").write_text("import sys; entries = [*sys.meta_path]; value = 1")
    yield tmp_path
    for name in (_NAME, "other_module"):
        sys.modules.pop(name, None)


@pytest.fixture
def watch(folder: Path) -> ImportWatch:
    """A watch that has been started."""
    made = ImportWatch(_NAME, lambda: calls.append(getattr(sys.modules.get(_NAME), "value", None)))
    calls.clear()
    made.start()
    return made


calls: list[Any] = []


def test_it_calls_once_the_module_is_loaded(watch: ImportWatch) -> None:
    """While the module runs the entry is gone, and its loader is its own."""
    before = [finder for finder in sys.meta_path if finder is not watch]
    assert len(before) == len(sys.meta_path) - 1
    module = importlib.import_module(_NAME)
    assert calls == [1]
    assert sys.meta_path == module.entries == before
    assert module.__spec__ is not None
    assert "exec_module" not in vars(module.__spec__.loader)
    importlib.reload(module)
    assert calls == [1]


def test_it_stands_where_files_are_found(watch: ImportWatch) -> None:
    """The first and the last entry are those that a script expects."""
    names = [getattr(finder, "__name__", "") for finder in sys.meta_path]
    assert sys.meta_path.index(watch) == names.index("PathFinder") - 1


def test_looking_is_not_importing(watch: ImportWatch) -> None:
    """`find_spec`, as libraries call it to see what is installed, leaves the watch in place."""
    assert importlib.util.find_spec(_NAME) is not None
    assert importlib.util.find_spec("no_such_module") is None
    assert calls == []
    importlib.import_module(_NAME)
    assert calls == [1]


def test_another_module_and_another_thread_import_it(watch: ImportWatch, folder: Path) -> None:
    """Whoever imports it."""
    (folder / "other_module.py").write_text(f"import {_NAME}")
    thread = threading.Thread(target=importlib.import_module, args=("other_module",))
    thread.start()
    thread.join()
    assert calls == [1]


def test_lazy_loading(watch: ImportWatch) -> None:
    """A module that is executed when it is first used is loaded then."""
    spec = importlib.util.find_spec(_NAME)
    assert spec is not None
    assert spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    sys.modules[_NAME] = module
    spec.loader.exec_module(module)
    assert calls == []
    assert module.value == 1
    assert len(calls) == 1


def test_what_the_module_raises_is_its_own(watch: ImportWatch, folder: Path) -> None:
    """Tracebacks and warnings know no frame of ours, and who catches the error may try again."""
    file = folder / f"{_NAME}.py"
    file.write_text("import warnings; warnings.warn('old', stacklevel=2); 1 / 0")
    script = compile(f"import {_NAME}", "<string>", "exec")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(ZeroDivisionError) as raised:
            exec(script, {"__name__": "script"})
    assert [frame.filename for frame in traceback.extract_tb(raised.tb)] == [__file__, "<string>", str(file)]
    assert caught[0].filename == "<string>"
    assert calls == []
    file.write_text("value = 1  # another size")
    importlib.invalidate_caches()
    importlib.import_module(_NAME)
    assert calls == [1]


def test_a_loader_of_several_modules(watch: ImportWatch) -> None:
    """Only the module that is waited for counts."""

    class Loader:
        def create_module(self, spec: Any) -> None:
            del spec

        def exec_module(self, module: Any) -> None:
            module.value = module.__name__

    class Finder:
        loader: Any = Loader()

        def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
            del path, target
            return importlib.util.spec_from_loader(name, self.loader) if name.endswith("_module") else None

    sys.meta_path.insert(sys.meta_path.index(watch) + 1, Finder())
    importlib.util.find_spec(_NAME)
    assert importlib.import_module("other_module").value == "other_module"
    assert calls == []
    importlib.import_module(_NAME)
    assert calls == [_NAME]


def test_a_module_that_is_there(folder: Path) -> None:
    """It calls at once."""
    importlib.import_module(_NAME)
    calls.clear()
    before = sys.meta_path[:]
    ImportWatch(_NAME, lambda: calls.append(1)).start()
    assert calls == [1]
    assert sys.meta_path == before


def test_it_can_be_stopped(watch: ImportWatch) -> None:
    """Then nothing calls any more."""
    watch.stop()
    assert watch not in sys.meta_path
    importlib.import_module(_NAME)
    assert calls == []
