"""`ddpdebug doctor`: abilities of this machine and this torch that ddpdebug uses, and parts that are off."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ddpdebug.commands._progress import progress
from ddpdebug.config.settings import Config

if TYPE_CHECKING:
    from ddpdebug.monitor.doctor import FeatureState, Report

_TEXT = """Say what ddpdebug finds here: versions, the machine and its limits, extras, the private names of torch that
it uses, what it wraps when it is attached, and what is off.

It attaches to its own process and takes that back; nothing is trained and no rank is started. Run it where the job
runs, with the same environment.

Exit codes: 0 nothing that should work is off, 1 something is off, 2 wrong usage.
"""


@click.command("doctor", help=_TEXT)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--verbose", is_flag=True, help="Print every private name, and everything that is wrapped.")
@click.option(
    "--import",
    "imports",
    metavar="MODULE",
    multiple=True,
    help="Load a module after attaching, as a script would, and say which of our wrappers it hides; may be repeated.",
)
def command(*, as_json: bool, verbose: bool, imports: tuple[str, ...]) -> Callable[[], int]:
    """Read the settings, and return the action that examines; it runs outside of click, as it imports user modules."""
    config = Config.load({}, os.environ, Path.cwd())

    def act() -> int:
        import json  # noqa: PLC0415 - not before it is needed

        from ddpdebug.monitor.doctor import examine  # noqa: PLC0415 - loads torch

        with progress("looking at this machine and this torch"):
            report = examine(config, imports)
        print(json.dumps(report.to_json(), indent=2) if as_json else "\n".join(_lines(report, verbose=verbose)))
        return int(bool(report.off))

    return act


def _lines(report: Report, *, verbose: bool) -> Iterator[str]:
    yield "versions       " + " · ".join(f"{name} {version}" for name, version in report.versions.items())
    yield "backends       " + " · ".join(f"{name} {state}" for name, state in report.backends.items())
    for check in report.checks:
        yield f"{check.name:14} {'off: ' if check.fine is False else ''}{check.text}"
    yield ""
    yield "private names of torch, by what they are for"
    for feature in report.features:
        yield from _feature(feature, verbose=verbose)
    yield ""
    wrappers = report.attached.wrappers
    placed = sum(wrapper.in_place for wrapper in wrappers)
    yield f"functions wrapped while attached: {placed} of {len(wrappers)}" + (
        ", all restored" if report.attached.restored else ", not all restored"
    )
    for wrapper in wrappers:
        notes = [] if wrapper.in_place else ["could not be wrapped"]
        notes += [f"over {wrapper.over}, which is not torch's"] if wrapper.over else []
        notes += [f"hidden under {wrapper.under}"] if wrapper.under else []
        if verbose or notes:
            yield f"  {wrapper.where}  {'; '.join([wrapper.why, *notes] if wrapper.why else notes)}"
    yield ""
    missing = list(report.missing)
    if report.off:
        yield f"off: {len(report.off)}"
        yield from (f"  {line}" for line in report.off)
    elif not missing:
        yield "nothing is missing"
    if missing:
        yield "missing, and how to get it:"
        yield from (f"  {line}" for line in missing)


def _feature(feature: FeatureState, *, verbose: bool) -> Iterator[str]:
    there = feature.names - feature.absent - len(feature.missing)
    state = f"{there} of {feature.names - feature.absent}" if feature.names > feature.absent else "not in this build"
    yield f"  {feature.name:32} {state}" + (f"  missing: {', '.join(feature.missing)}" if feature.missing else "")
    for name, off in feature.missing.items():
        yield f"    {name}: without it, {off}"
    if verbose:
        from ddpdebug.monitor.doctor import names_of  # noqa: PLC0415 - loads torch

        there_are = (name for name in names_of(feature) if name.path not in feature.missing)
        yield from (f"    {name.path}: without it, {name.off}" for name in there_are)
