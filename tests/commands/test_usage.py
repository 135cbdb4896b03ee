"""Wrong usage: one line on standard error, exit code 2, nothing started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ddpdebug import __version__
from ddpdebug.commands import main
from ddpdebug.commands._line import COMMANDS
from ddpdebug.commands._target import prepare
from ddpdebug.config.settings import options
from ddpdebug.errors import UsageError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder that holds one script, outside of any rank."""
    monkeypatch.chdir(tmp_path)
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "train.py").write_text("raise SystemExit('was started')", encoding="utf-8")
    (tmp_path / "file").touch()
    return tmp_path


@pytest.mark.parametrize("command", ["run", "check"])
@pytest.mark.parametrize(
    "line, words",
    [
        ("", "no script given"),
        ("--", "no script given"),
        ("no.py", "script 'no.py' does not exist"),
        (".", "is a directory without __main__.py"),
        ("-m", "needs the name of a module"),
        ("-m no_such_module.x", "no module named 'no_such_module'"),
        ("-m train.py/x", "not the name of a module"),
        ("--bugdet 0.1 train.py", "unknown option --bugdet; did you mean --budget?\n"),
        ("--zzz 0.1 train.py", "unknown option --zzz; --help lists all\n"),
        ("--budget", "requires an argument"),
        ("--budget x train.py", "--budget: 'x' is not valid; give a number from 0 to 1"),
        ("--nproc-per-node 0 train.py", "--nproc-per-node: '0' is not valid"),
        ("--guard halt train.py", "give 'off', 'observe', 'stop' or 'skip'"),
        ("--out file train.py", "--out"),
        ("--out /proc/no/such train.py", "cannot be written"),
        ("--every-step=1 train.py", "does not take a value"),
    ],
)
def test_wrong_line(command: str, line: str, words: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Every mistake is named, with what would be right; `run` exits as Python where a module is not there."""
    as_python = 1 if command == "run" and line[:2] in {"-m", "."} and line != "-m" else 2
    assert main([command, *line.split()]) == as_python
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("ddpdebug: error: ")
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("line", ["--junit . train.py", "--json file/x.json train.py", "--fail-on info train.py"])
def test_wrong_line_of_check(line: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Files that cannot be written are found before the ranks start."""
    assert main(["check", *line.split()]) == 2
    assert capfd.readouterr().err.startswith("ddpdebug: error: --")


def test_unknown_command(capfd: pytest.CaptureFixture[str]) -> None:
    """A misspelt command gets the right one, and an unknown one those that there are."""
    assert main(["chekc", "train.py"]) == 2
    assert capfd.readouterr().err == "ddpdebug: error: unknown command 'chekc'; did you mean check?\n"
    assert main(["zzz"]) == 2
    assert "valid are run, check, preflight" in capfd.readouterr().err


@pytest.mark.parametrize("variable", ["DDPDEBUG_BUGDET", "DDPDEBUG_BUDGET"])
def test_wrong_environment(variable: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """A wrong variable is an error too."""
    monkeypatch.setenv(variable, "x")
    assert main(["run", "train.py"]) == 2
    assert variable in capfd.readouterr().err


def test_syntax_errors_come_before_the_ranks(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """No rank is started for a script that cannot be compiled; what is printed is what Python prints."""
    (folder / "train.py").write_text("x = (\n")
    assert main(["run", "--nproc-per-node", "2", "train.py"]) == 1
    plain = subprocess.run([sys.executable, "train.py"], capture_output=True, text=True, check=False)
    assert capfd.readouterr().err == plain.stderr


def test_ranks_cannot_start_ranks(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """`--nproc-per-node` inside a rank is refused; from the environment it is ignored."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["run", "--nproc-per-node", "2", "train.py"]) == 2
    assert "is rank 1 already" in capfd.readouterr().err
    monkeypatch.setenv("DDPDEBUG_NPROC_PER_NODE", "2")
    assert prepare({}, ["train.py"], "run").in_rank


def test_script_gets_everything_after_its_name() -> None:
    """Options stand before the script; what follows is the script's, whatever it looks like."""
    request = prepare({}, ["train.py", "--budget", "x", "-m", "--", "--help"], "run")
    assert request.target.command == ("train.py", "--budget", "x", "-m", "--", "--help")
    assert prepare({}, ["-m", "this", "--budget"], "run").target.command == ("-m", "this", "--budget")
    assert prepare({}, ["--", "train.py"], "run").target.command == ("train.py",)


def test_other_ranks_do_not_touch_the_directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only rank 0 writes the shared files, so only rank 0 must be able to."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert prepare({"out": "file"}, ["train.py"], "run").config.out == folder / "file"
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UsageError):
        prepare({"out": "file"}, ["train.py"], "run")


@pytest.mark.parametrize("command", ["run", "check"])
def test_help_names_every_option(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    """The help of a command lists its settings and hides what ranks are started with."""
    assert main([command, "--help"]) == 0
    text = capfd.readouterr().out
    assert all(option.flag in text for option in options(command))
    assert "--as-check" not in text


def test_bare_command(capfd: pytest.CaptureFixture[str]) -> None:
    """`ddpdebug` alone shows the commands."""
    assert main([]) == 0
    text = capfd.readouterr().out
    assert all(command in text for command in COMMANDS)


def test_what_is_wrong_once_a_command_acts_is_a_message_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rank 1 does not test `--out` while the line is read; that it cannot be made comes up when the run begins."""
    (tmp_path / "train.py").write_text("")
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "1")
    assert main(["check", "--out", "file/run", "train.py"]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("ddpdebug: error: cannot make ")
    assert line.endswith("is no directory; name another with --out")


def test_what_a_script_does_wrong_keeps_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that gives us a wrong value has failed; the line that started it was right."""
    monkeypatch.setattr(sys, "argv", sys.argv[:])
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr("ddpdebug.commands._rank.Rank.attach", lambda _: None)
    script = tmp_path / "train.py"
    script.write_text("from ddpdebug.errors import UsageError\nraise UsageError('unknown option')\n")
    with pytest.raises(UsageError, match="unknown option") as caught:
        main(["run", str(script)])
    assert caught.traceback[-1].path == script


def test_module_is_the_command() -> None:
    """`python -m ddpdebug` is `ddpdebug`."""
    done = subprocess.run([sys.executable, "-m", "ddpdebug", "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"ddpdebug {__version__}\n")
