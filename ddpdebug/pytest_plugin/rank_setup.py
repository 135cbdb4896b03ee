"""Options of the ranks' pytest sessions, taken from the session that the user started. Torch-free."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

#: Options of the session that are its own business, or that a rank must not act on.
_RANK_OPTIONS: Mapping[str, Any] = {
    "maxfail": 0,
    "usepdb": False,
    "trace": False,
    "pyargs": False,
    "lf": False,
    "failedfirst": False,
    "newfirst": False,
    "stepwise": False,
    "xmlpath": None,
    "log_file": os.devnull,
    "pastebin": None,
    "cacheclear": False,
    "no_cov": True,
    "looponfail": False,
    "dist": "no",
    "tx": [],
    "numprocesses": None,
    "maxprocesses": None,
    "capture": "no",
}


def rank_setup(config: pytest.Config, directory: Path) -> dict[str, Any]:
    """Return the settings for the process that forks the ranks; `directory` is the ranks' own and temporary."""
    options = {key: value for key, value in vars(config.option).items() if _is_plain(value)}
    options.pop("file_or_dir", None)  # they are the arguments
    ours = {key: value for key, value in _RANK_OPTIONS.items() if key in options}
    options |= ours | {"rootdir": str(config.rootpath), "plugins": [*config.option.plugins, "no:terminal"]}
    if config.inipath is not None:
        options["inifilename"] = str(config.inipath)
    return {
        "path": sys.path,
        "directory": str(directory),
        "options": pickle.dumps(options),
        "args": config.args,
        "workerinput": {
            "workercount": 1,
            "testrunuid": f"{os.getpid():x}",
            "mainargv": sys.argv,
            **getattr(config, "workerinput", {}),
        },
    }


def _is_plain(value: object) -> bool:
    try:
        pickle.dumps(value)
    except Exception:  # noqa: BLE001 - whatever a plugin has put there
        return False
    return True
