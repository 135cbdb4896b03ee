"""The settings of a loss, from its autograd graph: loss functions, reductions, class weights, margins."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ddpdebug import fingerprint
from ddpdebug.probes import async_copy as device
from ddpdebug.probes.training_loop.loss_graph import below_scaler, plain_name
from ddpdebug.schema.announcements import LOSS_FUNCTIONS, LossSettings
from ddpdebug.torch_internals import graph, is_plain, version_of

#: Looks after which what has not changed is a setting; that it is told again after each few, and then less often.
_FIRST_TOLD, _AGAIN, _SELDOM = 16, 4, 32
_MAX_LINES = 8  # of the script that have a loss of their own
_MAX_NODES, _MAX_WEIGHTS = 64, 1 << 16
_NUMBERS = ("reduction", "ignore_index", "beta", "delta", "margin", "p", "log_target", "blank", "zero_infinity")
_WEIGHTS = ("weight", "pos_weight")

_Weights = dict[str, tuple[torch.Tensor, str]]


class Settings:
    """The loss settings of each line; announced once they are constant and differ from those announced last."""

    def __init__(self) -> None:
        self._lines: dict[str | None, _Line] = {}
        self._shares: tuple[int, Sequence[Callable[[], float] | None]] | None = None

    def step_ends(self, step: int, shares: Sequence[Callable[[], float] | None]) -> None:
        """Take what tells which part of the labels that divide it each loss of a step is the sum over."""
        self._shares = step, shares

    def look(self, root: torch.Tensor, line: str | None, *, by_scaler: bool) -> tuple[int, LossSettings] | None:
        """Read a loss before its backward; return its number and settings once they are known, else None."""
        known = self._lines.get(line)
        if known is None:
            if len(self._lines) >= _MAX_LINES:
                return None
            known = self._lines[line] = _Line(len(self._lines))
        settings = known.look(root, by_scaler=by_scaler)
        if settings is None:
            return None
        share, counted = self._share()
        return known.number, LossSettings(location=line, settings=settings, share=share, counted=counted)

    def _share(self) -> tuple[float | None, int | None]:
        """Return the share of the newest step that has ended, and its number."""
        step, shares = self._shares or (None, ())
        known = [share() for share in shares if share is not None]
        whole = math.fsum(known) if known and len(known) == len(shares) else math.nan
        return (whole, step) if math.isfinite(whole) else (None, None)


class _Line:
    def __init__(self, number: int) -> None:
        self.number = number
        self._looks = 0
        self._same: dict[str, str] | None = None  # since it was told last
        self._digests: tuple[list[str], Callable[[], Sequence[int]]] | None = None

    def look(self, root: torch.Tensor, *, by_scaler: bool) -> dict[str, str] | None:
        self._looks += 1
        found, weights = _settings(root, by_scaler=by_scaler)
        found.update({name: shown for name, (_, shown) in weights.items()})
        same = found if self._same is None else self._same
        self._same = {name: value for name, value in same.items() if found.get(name) == value}
        if _is_told(self._looks + 1):  # numbers of a device are on their way until the next look
            self._digests = [*weights], device.digests([weight for weight, _ in weights.values()])
        return self._told() if _is_told(self._looks) else None

    def _told(self) -> dict[str, str]:
        assert self._digests is not None
        assert self._same is not None
        (names, digests), same = self._digests, self._same
        self._digests = self._same = None
        values = dict(zip(names, digests(), strict=True))
        # what shows a change is each rank's own
        told = {name: value.partition("@")[0] for name, value in same.items()}
        return {name: f"{shown}:{values[name]:016x}" if name in values else shown for name, shown in told.items()}


def _is_told(looks: int) -> bool:
    often = looks % _AGAIN == 0 if looks <= _SELDOM else looks & (looks - 1) == 0
    return looks >= _FIRST_TOLD and often


def _settings(root: torch.Tensor, *, by_scaler: bool) -> tuple[dict[str, str], _Weights]:
    """Return the settings of a loss; and the weights of classes with what shows a change: on a device no values."""
    terms = _terms(root, by_scaler=by_scaler)
    names = [plain_name(graph.name_of(node)) for node in terms]
    settings, weights = {LOSS_FUNCTIONS: " + ".join(sorted(set(names)))}, _Weights()
    for name, node in zip(names, terms, strict=True):
        if names.count(name) > 1:  # which of them is which, nobody knows
            continue
        for number in _NUMBERS:
            if (value := graph.saved_setting(node, number)) is not None:
                settings[f"{name}.{number}"] = str(value)
        for key in _WEIGHTS:
            weight = graph.saved_tensor(node, key)
            if weight is not None and is_plain(weight) and 0 < weight.numel() <= _MAX_WEIGHTS:
                what = fingerprint.fingerprint(weight) if weight.is_cpu else (weight.data_ptr(), version_of(weight))
                weights[f"{name}.{key}"] = weight, f"{tuple(weight.shape)}@{what}"
    return settings, weights


def _terms(root: torch.Tensor, *, by_scaler: bool) -> list[Any]:
    """Return the operations that make one number of many, or of none, and that a loss is added up of."""
    found, waiting = list[Any](), [below_scaler(root, by_scaler=by_scaler)]
    for _ in range(_MAX_NODES):
        node = waiting.pop(0) if waiting else None
        if node is None:
            break
        scalars = [below for below, at in node.next_functions if below is not None and graph.shape_at(below, at) == ()]
        if scalars:
            waiting += scalars
        else:
            found.append(node)
    return found
