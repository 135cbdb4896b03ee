"""A script run by the runner and by plain Python must be indistinguishable: output, traceback, exit status."""

from __future__ import annotations

import py_compile
import re
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from machine import PATIENCE

from ddpdebug.errors import StopRun, TargetError
from ddpdebug.processes.script import Target

_RUNNER = Path(__file__).parent.parent / "support" / "scripts" / "plain_runner.py"

_SHOW = """
import sys
print(sys.argv, __name__, __file__, sys.path[0], __package__, __cached__)
print(sorted(globals()), type(__loader__).__name__, __spec__ and __spec__.name, __doc__, type(__builtins__).__name__)
print(sys.modules["__main__"].__dict__ is globals(), __import__("__main__").__name__, flush=True)
"""
_SPAWN = """
import multiprocessing as mp, pickle
class Box:
    def __init__(self, value): self.value = value
def work(box, queue): queue.put((box.value * 2, __name__))
if __name__ == "__main__":
    for method in ("fork", "spawn"):
        context = mp.get_context(method)
        queue = context.Queue()
        process = context.Process(target=work, args=(Box(21), queue))
        process.start(); print(method, queue.get(timeout=200)); process.join(); print(process.exitcode)
    print(pickle.loads(pickle.dumps(Box(3))).value, Box.__module__)
"""
_HOOK = """
import sys
def hook(kind, value, trace):
    import traceback
    print("hook", kind.__name__, value, [f.name for f in traceback.extract_tb(trace)])
sys.excepthook = hook
def f(): raise KeyError("k")
f()
"""
_CHAIN = """
def f():
    try: {}["a"]
    except KeyError as error: raise ValueError("b") from error
f()
"""
_ATEXIT = """
import atexit, __main__
x = 5
atexit.register(lambda: print("bye", __main__.x))
raise SystemExit(4)
"""
_PICKLE_AT_EXIT = """
import atexit, pickle
class Late: pass
atexit.register(lambda: print(type(pickle.loads(pickle.dumps(Late()))).__name__))
"""
_FORK = """
import os, sys
pid = os.fork()
if pid:
    _, status = os.waitpid(pid, 0)
    print("child", os.waitstatus_to_exitcode(status)); sys.exit(2)
print("in the child", flush=True); sys.exit(6)
"""
_THREAD = """
import threading
threading.Thread(target=lambda: (threading.main_thread().join(), print("thread done"))).start()
print("main done")
"""
_HOOK_EXITS = "import sys\ndef hook(*a):\n    print('hook'); sys.exit(9)\nsys.excepthook = hook\n1 / 0"
_HOOK_RAISES = "import sys\ndef hook(*a):\n    print(sys.exc_info()); {}['x']\nsys.excepthook = hook\n1 / 0"

#: name -> (files, words after `python`)
CASES: dict[str, tuple[dict[str, str], list[str]]] = {
    "surroundings": ({"a.py": _SHOW}, ["a.py", "--lr", "1e-3", "--", "-m", "x"]),
    "docstring": ({"a.py": '"""Doc."""' + _SHOW}, ["a.py"]),
    "dotted path": ({"a.py": _SHOW}, ["./a.py"]),
    "sibling import": ({"d/a.py": "import b; print(b.X)", "d/b.py": "X = 3"}, ["d/a.py"]),
    "path through parent": ({"d/a.py": _SHOW}, ["d/../d/a.py"]),
    "exit with a number": ({"a.py": "import sys; print('x'); sys.exit(3)"}, ["a.py"]),
    "exit with a negative number": ({"a.py": "import sys; sys.exit(-1)"}, ["a.py"]),
    "exit with a text": ({"a.py": "import sys; sys.exit('went wrong')"}, ["a.py"]),
    "exit with nothing": ({"a.py": "import sys; sys.exit()"}, ["a.py"]),
    "exit with a tuple": ({"a.py": "raise SystemExit((1, 2))"}, ["a.py"]),
    "exception": ({"a.py": "def f():\n    raise ValueError('x')\nf()"}, ["a.py"]),
    "chained exception": ({"a.py": _CHAIN}, ["a.py"]),
    "exception group": ({"a.py": "raise ExceptionGroup('g', [ValueError(1), KeyError(2)])"}, ["a.py"]),
    "nested import error": ({"a.py": "import b", "b.py": "import c", "c.py": "import no_such"}, ["a.py"]),
    "syntax error": ({"a.py": "x = 1\ndef f(:\n"}, ["a.py"]),
    "syntax error in an import": ({"a.py": "import b", "b.py": "def f(:\n"}, ["a.py"]),
    "excepthook": ({"a.py": _HOOK}, ["a.py"]),
    "excepthook that exits": ({"a.py": _HOOK_EXITS}, ["a.py"]),
    "excepthook that raises": ({"a.py": _HOOK_RAISES}, ["a.py"]),
    "exit handler": ({"a.py": _ATEXIT}, ["a.py"]),
    "pickle at exit": ({"a.py": _PICKLE_AT_EXIT}, ["a.py"]),
    "os._exit": ({"a.py": "import os; print('lost'); os._exit(5)"}, ["a.py"]),
    "abort": ({"a.py": "import os; os.abort()"}, ["a.py"]),
    "killed by SIGTERM": ({"a.py": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"}, ["a.py"]),
    "interrupted": ({"a.py": "import os, time; os.kill(os.getpid(), 2); time.sleep(5)"}, ["a.py"]),
    "raises KeyboardInterrupt": ({"a.py": "raise KeyboardInterrupt"}, ["a.py"]),
    "multiprocessing": ({"a.py": _SPAWN}, ["a.py"]),
    "multiprocessing in a module": ({"p/__init__.py": "", "p/m.py": _SPAWN}, ["-m", "p.m"]),
    "os.fork": ({"a.py": _FORK}, ["a.py"]),
    "thread outlives main": ({"a.py": _THREAD}, ["a.py"]),
    "future imports stay apart": ({"a.py": "def f(x: y_unknown): pass"}, ["a.py"]),
    "latin-1 source": ({"a.py": "# -*- coding: latin-1 -*-\nprint('\\u00e9')"}, ["a.py"]),
    "stdin": ({"a.py": "print(input())"}, ["a.py"]),
    "module": ({"p/__init__.py": "print('package')", "p/m.py": _SHOW}, ["-m", "p.m", "-m", "1"]),
    "package": ({"p/__init__.py": "", "p/__main__.py": _SHOW}, ["-m", "p", "--x"]),
    "relative import": (
        {"p/__init__.py": "", "p/m.py": "from . import n; print(n.X)", "p/n.py": "X = 2"},
        ["-m", "p.m"],
    ),
    "exception in a module": ({"p/__init__.py": "", "p/m.py": "raise ValueError(1)"}, ["-m", "p.m"]),
    "exception in its package": ({"p/__init__.py": "1 / 0", "p/m.py": ""}, ["-m", "p.m"]),
    "interrupted module": ({"p/__init__.py": "", "p/m.py": "raise KeyboardInterrupt"}, ["-m", "p.m"]),
}


def _write(files: dict[str, str], folder: Path) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


def _run(words: list[str], folder: Path) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        input="a line\n",
        check=False,
    )
    return done.returncode, done.stdout, _without_runpy(done.stderr)


def _without_runpy(text: str) -> str:
    """Take away what plain Python itself puts on top of a module's traceback."""
    return re.sub(r'  File "<frozen runpy>".*\n', "", text)


@pytest.mark.parametrize("name", CASES)
def test_like_plain_python(name: str, tmp_path: Path) -> None:
    """Standard output, standard error and exit status are those of `python script.py`."""
    files, words = CASES[name]
    _write(files, tmp_path)
    assert _run([str(_RUNNER), *words], tmp_path) == _run(words, tmp_path)


def test_symlink(tmp_path: Path) -> None:
    """A linked script imports from where it really lies, as in plain Python."""
    _write({"real/a.py": "import b\n" + _SHOW, "real/b.py": ""}, tmp_path)
    (tmp_path / "link.py").symlink_to(tmp_path / "real" / "a.py")
    assert _run([str(_RUNNER), "link.py"], tmp_path) == _run(["link.py"], tmp_path)


def test_interrupt_from_outside(tmp_path: Path) -> None:
    """Ctrl-C ends the script by SIGINT after its own `finally`, like plain Python."""
    # on one line, which the traceback names wherever the signal comes; and in short naps: a signal between two of them
    # is seen after the next one, but before a single long one it would be seen only when that is over
    loop = "while print(*up, end='', flush=True) is None: up.clear(); time.sleep(0.01)"
    source = f"import time\nup = ['up\\n']\ntry:\n    {loop}\nfinally:\n    print('down')"
    _write({"a.py": source}, tmp_path)
    ends = []
    for words in (["a.py"], [str(_RUNNER), "a.py"]):
        with subprocess.Popen([sys.executable, *words], cwd=tmp_path, stdout=-1, stderr=-1, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=PATIENCE)
            ends.append((process.returncode, out, re.sub(r"^ +[~^]+\n", "", err, flags=re.MULTILINE)))
    assert ends[0] == ends[1]
    assert ends[0][0] == -signal.SIGINT


_WITH_MONITOR = """
import sys
from ddpdebug.errors import StopRun
from ddpdebug.processes.script import Target, end_with, run_script
class Monitor:
    code = None
    def close(self, reason, exit_code):
        self.code = exit_code
        print("close", reason, exit_code, flush=True)
monitor = Monitor()
mode = sys.argv[2]
if mode != "soft":
    end_with(lambda: 5 if mode == "verdict" else monitor.code)
run_script(Target(name=sys.argv[1]), before=lambda: monitor)
"""


@pytest.mark.parametrize(
    "source, closing, status",
    [
        ("pass", "close finished 0", 0),
        ("raise SystemExit(0)", "close finished 0", 0),
        ("raise SystemExit(7)", "close exception: SystemExit: 7 7", 7),
        ("raise SystemExit('x')", "close exception: SystemExit: x 1", 1),
        ("raise ValueError('bad')", "close exception: ValueError: bad 1", 1),
        ("raise KeyboardInterrupt", "close interrupted 130", -2),
        ("from ddpdebug.errors import StopRun\nraise StopRun(3)", "close stopped 0", 0),
        ("from ddpdebug import UsageError\nraise UsageError('my own')", "close exception: UsageError: my own 1", 1),
    ],
)
def test_monitor_hears_the_end(source: str, closing: str, status: int, tmp_path: Path) -> None:
    """The monitor is closed once, with the reason and the exit code that the process will have."""
    _write({"a.py": source, "driver.py": _WITH_MONITOR}, tmp_path)
    code, out, _ = _run(["driver.py", "a.py", "soft"], tmp_path)
    assert (code, out) == (status, closing + "\n")


def test_stopped_scripts_clean_up(tmp_path: Path) -> None:
    """A stop after `--steps` passes `except Exception`, runs `finally` blocks, and prints no traceback."""
    source = """
from ddpdebug.errors import StopRun
try:
    try: raise StopRun(3)
    except Exception: print('caught')
finally: print('clean')
"""
    _write({"a.py": source, "driver.py": _WITH_MONITOR}, tmp_path)
    assert _run(["driver.py", "a.py", "soft"], tmp_path) == (0, "clean\nclose stopped 0\n", "")


def test_status_comes_after_the_teardown(tmp_path: Path) -> None:
    """Threads, exit handlers, files that nobody has closed and destructors come first, and print what they print."""
    source = (
        _THREAD
        + """
import atexit, weakref
atexit.register(print, 'handler')
class D:
    def __del__(self): print('teardown')
d = D()
weakref.finalize(d, print, 'finalized')
unclosed = open('log', 'w')
unclosed.write('a line')
raise SystemExit(7)
"""
    )
    _write({"a.py": source, "driver.py": _WITH_MONITOR}, tmp_path)
    plain = _run(["a.py"], tmp_path)
    (tmp_path / "log").unlink()
    code, out, err = _run(["driver.py", "a.py", "verdict"], tmp_path)
    assert (code, err) == (5, plain[2])
    assert out.replace("close exception: SystemExit: 7 7\n", "") == plain[1]
    assert (tmp_path / "log").read_text() == "a line"


def test_older_exit_handlers_have_their_turn(tmp_path: Path) -> None:
    """Those that were registered before ddpdebug was there, such as coverage's, run before the process ends."""
    early = "import atexit\natexit.register(print, 'early')\n"
    _write({"a.py": "raise SystemExit(7)", "driver.py": early + _WITH_MONITOR}, tmp_path)
    code, out, err = _run(["driver.py", "a.py", "end"], tmp_path)
    assert (code, err) == (7, "")
    assert out.splitlines() == ["close exception: SystemExit: 7 7", "early"]


def test_set_status_is_the_scripts(tmp_path: Path) -> None:
    """A failed script exits with its own status and prints its traceback."""
    _write({"a.py": "raise SystemExit(7)", "b.py": "1 / 0", "driver.py": _WITH_MONITOR}, tmp_path)
    assert _run(["driver.py", "a.py", "end"], tmp_path)[0] == 7
    code, _, err = _run(["driver.py", "b.py", "end"], tmp_path)
    assert code == 1
    assert err.endswith("ZeroDivisionError: division by zero\n")
    assert "runner.py" not in err


def test_fork_does_not_close(tmp_path: Path) -> None:
    """A forked child that reaches the end of the script is not the rank: only the parent closes."""
    _write({"a.py": "import os\nif os.fork(): os.wait()", "driver.py": _WITH_MONITOR}, tmp_path)
    assert _run(["driver.py", "a.py", "end"], tmp_path)[1] == "close finished 0\n"


@pytest.mark.parametrize(
    "target, words",
    [
        (Target(name="no_such.py"), "does not exist"),
        (Target(name="."), "is a directory without __main__.py"),
        (Target(name="no_such_package.m", module=True), "no module named 'no_such_package'"),
        (Target(name="a.py/b", module=True), "not the name of a module"),
        (Target(name="__main__", module=True), "not the name of a module"),
    ],
)
def test_nothing_to_run(target: Target, words: str) -> None:
    """What cannot be run is refused before anything starts, and says why."""
    with pytest.raises(TargetError, match=re.escape(words)):
        target.check()


_MAIN = "import helper\n" + _SHOW


def _archive(folder: Path) -> list[str]:
    with zipfile.ZipFile(folder / "app.pyz", "w") as made:
        made.writestr("__main__.py", _MAIN)
        made.writestr("helper.py", "print('helper')")
    return ["app.pyz", "--x"]


def _folder(folder: Path) -> list[str]:
    _write({"app/__main__.py": _MAIN, "app/helper.py": "print('helper')"}, folder)
    return ["app", "--x"]


def _compiled(folder: Path) -> list[str]:
    _write({"a.py": _SHOW}, folder)
    py_compile.compile(str(folder / "a.py"), str(folder / "b.pyc"))
    return ["b.pyc", "--x"]


def _compiled_without_suffix(folder: Path) -> list[str]:
    _compiled(folder)
    (folder / "b.pyc").rename(folder / "b")
    return ["b"]


def _damaged(folder: Path) -> list[str]:
    (folder / "b.pyc").write_bytes(b"x" * 40)
    return ["b.pyc"]


def _no_main(folder: Path) -> list[str]:
    _write({"app/helper.py": ""}, folder)
    return ["app"]


@pytest.mark.parametrize(
    "make",
    [_archive, _folder, _compiled, _compiled_without_suffix, _damaged, _no_main],
)
def test_other_kinds_of_programs(make: Callable[[Path], list[str]], tmp_path: Path) -> None:
    """Zip files, directories and compiled files run, or fail, as Python runs them."""
    words = make(tmp_path)
    assert _run([str(_RUNNER), *words], tmp_path) == _run(words, tmp_path)


@pytest.mark.parametrize("name", ["nothere", "p", "p.nothing", "json.nothing", "zlib"])
def test_modules_that_cannot_be_run(name: str, tmp_path: Path) -> None:
    """What is no module, or has no code, is refused with Python's own words and status."""
    _write({"p/__init__.py": ""}, tmp_path)
    plain = _run(["-m", name], tmp_path)
    assert plain[0] == 1
    assert _run([str(_RUNNER), "-m", name], tmp_path) == plain


def test_syntax_is_checked_beforehand(tmp_path: Path) -> None:
    """A script that cannot be compiled is known before anything runs; of other kinds nothing is said."""
    _write({"a.py": "x = (", "b.py": "print('\\d')"}, tmp_path)
    told = Target(name=str(tmp_path / "a.py")).syntax_error() or ""
    assert told.splitlines()[-1].startswith("SyntaxError")
    assert Target(name=str(tmp_path / "b.py")).syntax_error() is None  # its warning comes when it runs
    for make in (_archive, _folder, _compiled):
        assert Target(name=str(tmp_path / make(tmp_path)[0])).syntax_error() is None


def test_stop_is_no_exception() -> None:
    """`except Exception` in a script must not swallow the stop."""
    assert not issubclass(StopRun, Exception)


def test_runner_is_light(tmp_path: Path) -> None:
    """A script that runs through the command finds next to nothing loaded that `python -m` does not load."""
    source = "import sys; print(*(name for name in sys.modules if not name.startswith('ddpdebug')))"
    _write({"a.py": source, "p/__init__.py": "", "p/a.py": source}, tmp_path)
    plain = _run(["-m", "p.a"], tmp_path)[1].split()
    through = _run(["-m", "ddpdebug", "run", "--quiet", "a.py"], tmp_path)[1].split()
    assert {*through} - {*plain} <= {"__future__", "atexit"}


def test_the_folder_of_a_script_is_that_of_the_interpreter(tmp_path: Path) -> None:
    """Of links to files and to pipes as well, where it follows one link and no other."""
    (tmp_path / "there").mkdir()
    script = tmp_path / "there" / "script.py"
    script.write_text("import sys; print(sys.path[0])")
    (tmp_path / "link.py").symlink_to("there/script.py")
    for path, given in ((tmp_path / "link.py", None), (script, None), ("/dev/stdin", script.read_text())):
        plain = subprocess.run([sys.executable, path], input=given, capture_output=True, text=True, check=True)
        ours = f"import sys; from ddpdebug.processes.script import _folder_of; print(_folder_of({str(path)!r}))"
        found = subprocess.run([sys.executable, "-c", ours], input=given, capture_output=True, text=True, check=True)
        assert found.stdout == plain.stdout
