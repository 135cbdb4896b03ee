"""Execution of one test marked with `ranks`: reads the mark, runs the ranks, merges their reports into one."""

from __future__ import annotations

import builtins
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

from ddpdebug.errors import did_you_mean
from ddpdebug.pytest_plugin.pool import Outcome, Pool, Task
from ddpdebug.pytest_plugin.results import Merger, bare_report

_DEVICES = ("cpu", "cuda")
_ARGUMENTS = ("world", "timeout", "device", "group")


def run_in_ranks(item: pytest.Item, nextitem: pytest.Item | None, mark: pytest.Mark, pool: Callable[[], Pool]) -> None:
    """Run a test in rank processes and report it like any other test."""
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    outcome: Outcome | None = None
    try:
        task = _task(item, mark)
        outcome = pool().run(task)
        reports = _reports(item, task, outcome)
    except (ValueError, TypeError) as error:
        reports = _error(item, f"@pytest.mark.ranks: {error}")
    except pytest.fail.Exception as error:  # a plugin's own deadline, from a signal handler
        reports = _error(item, f"the ranks were ended: {error}")
    reports += _finish_earlier_fixtures(item, nextitem)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    for message in _distinct(outcome.warnings if outcome else ()):
        _warn(item.config, message)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    if outcome is not None and outcome.stop is not None:
        pytest.exit(outcome.stop)


def _reports(item: pytest.Item, task: Task, outcome: Outcome) -> list[pytest.TestReport]:
    if outcome.trouble is not None:
        said = "".join(f"\n\noutput of rank {r.rank}:\n{r.output}" for r in outcome.ranks if r.output)
        return _error(item, outcome.trouble + said)
    config = item.config

    def load(data: dict[str, Any]) -> Any:
        report = config.hook.pytest_report_from_serializable(config=config, data=data)
        if isinstance(report.longrepr, list):
            report.longrepr = tuple(report.longrepr)  # of a skip; JSON has no tuples
        return report

    merger = Merger(item, outcome.ranks, load, str(config.rootpath))
    reports = merger.reports(task.timeout)
    failed = next((report for report in reports if report.failed), None)
    if failed is not None and config.getoption("usepdb", default=False):
        failed.sections.append(("pdb", "--pdb does not reach into ranks; run the body in one process to step through"))
    return reports


def _task(item: pytest.Item, mark: pytest.Mark) -> Task:
    """Read the mark's arguments; raise ValueError or TypeError for wrong ones."""
    for name in mark.kwargs:
        if name not in _ARGUMENTS:
            raise ValueError(f"unknown argument {name!r}; {did_you_mean(name, _ARGUMENTS)}")
    if not mark.args and "world" not in mark.kwargs:
        raise ValueError("how many? give the number of ranks, as in @pytest.mark.ranks(2)")
    return _read_mark(item, *mark.args, **mark.kwargs)


def _read_mark(
    item: pytest.Item, world: int, *, timeout: float | None = None, device: str = "cpu", group: bool = True
) -> Task:
    if isinstance(world, bool) or not isinstance(world, int) or world < 1:
        raise ValueError(f"the number of ranks must be a whole number from 1 on, not {world!r}")
    if device not in _DEVICES:
        raise ValueError(f"device must be 'cpu' or 'cuda', not {device!r}")
    seconds = item.config.getini("ranks_timeout") if timeout is None else timeout
    if isinstance(seconds, bool) or float(seconds) <= 0:
        raise ValueError(f"timeout must be a number of seconds above 0, not {seconds!r}")
    return Task(
        nodeid=item.nodeid, path=str(item.path), world=world, timeout=float(seconds), device=device, group=bool(group)
    )


def _finish_earlier_fixtures(item: pytest.Item, nextitem: pytest.Item | None) -> list[pytest.TestReport]:
    """Take down what earlier tests of this process have set up and the next one does not need."""
    call = pytest.CallInfo.from_call(lambda: item.session._setupstate.teardown_exact(nextitem), when="teardown")  # noqa: SLF001 - pytest has no public way
    return [] if call.excinfo is None else [pytest.TestReport.from_item_and_call(item, call)]


def _error(item: pytest.Item, text: str) -> list[pytest.TestReport]:
    return [bare_report(item, "setup", "failed", text), bare_report(item, "teardown")]


def _distinct(messages: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Keep one of the warnings that all ranks give."""
    found = {(m["text"], tuple(m["category"]), m["file"], m["line"]): m for m in reversed(list(messages))}
    return list(reversed(found.values()))


def _warn(config: pytest.Config, message: Mapping[str, Any]) -> None:
    """Pass a rank's warning to the summary."""
    module, name = message["category"]
    known = getattr(builtins, name, Warning) if module == "builtins" else Warning
    category = known if isinstance(known, type) and issubclass(known, Warning) else Warning
    text = message["text"] if category is not Warning else f"{name}: {message['text']}"
    warning = warnings.WarningMessage(category(text), category, message["file"], message["line"])
    location = message["location"] and tuple(message["location"])
    config.hook.pytest_warning_recorded.call_historic(
        kwargs={
            "warning_message": warning,
            "when": message["when"],
            "nodeid": message["nodeid"],
            "location": location,
        }
    )
