"""Finds the rules: walks this package, sorted by code, so that every rank runs the same rules in the same order."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import tomllib
from importlib import resources
from typing import Any

from ddpdebug import detectors
from ddpdebug.detectors.base import Detector
from ddpdebug.schema.finding import Severity

#: The families of codes, each a folder of this package, in the order in which people are shown them.
FAMILIES = {
    "RANK": "replicas agree",
    "SYNC": "gradients are synchronised",
    "NUM": "numerics",
    "MEM": "memory",
    "HANG": "progress",
    "SLOW": "speed",
    "FAIL": "errors of torch",
    "HLTH": "signals of training",
    "RCP": "recipe",
    "DATA": "input",
}


def catalog() -> list[type[Detector]]:
    """Return every rule, sorted by code."""
    rules: dict[str, type[Detector]] = {}
    for info in pkgutil.walk_packages(detectors.__path__, f"{detectors.__name__}."):
        if info.ispkg:
            continue
        module = importlib.import_module(info.name)
        for rule in vars(module).values():
            if inspect.isclass(rule) and issubclass(rule, Detector) and "code" in vars(rule):
                assert rules.setdefault(rule.code, rule) is rule, f"two rules have the code {rule.code}"
    return [rules[code] for code in sorted(rules)]


def planned() -> dict[str, dict[str, Any]]:
    """Return the codes of the catalogue that no rule detects: code -> its prose, sorted by code.

    Those with a key `found_by` are found by a command, for example `preflight`; the others are not found yet.
    """
    text = resources.files(detectors).joinpath("planned.toml").read_text(encoding="utf-8")
    tables = tomllib.loads(text)
    return {code: {**tables[code], "severity": Severity.parse(tables[code]["severity"])} for code in sorted(tables)}
