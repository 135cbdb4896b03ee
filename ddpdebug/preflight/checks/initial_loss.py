"""Point 3, the initial loss: its value against that of an uninformed model, and the inputs of the loss function."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from statistics import fmean

import torch
from torch import Tensor

from ddpdebug.preflight.checks.labels import classes_of, kept
from ddpdebug.preflight.examine import each
from ddpdebug.preflight.observe import LossCall, Seen, moments, observe_all
from ddpdebug.preflight.output.results import Check, Status
from ddpdebug.preflight.subject import Subject
from ddpdebug.probes.ranges import dtype_name

#: How far above log C the first loss may be, as a share of it. Logits of deviation s cost about s*s / 2 on top:
#: those of an ordinary initialisation (s up to 1) cost 0.5; 1.5 is s = 1.7, where one layer meets large inputs.
_ABOVE = 0.5
_ABOVE_NATS = 1.5
#: Below it a model must know something. Labels that are not balanced are known by their frequencies alone.
_BELOW = 0.8
#: Logits of which an ordinary initialisation has about 0 to 1 as deviation.
_WIDE_LOGITS = 5.0
#: What is so far below 0 is a mask.
_MASKED = -1e4
_CLASSED = frozenset({"cross_entropy", "nll_loss"})
_ON_LOGITS = frozenset({"cross_entropy", "binary_cross_entropy_with_logits"})
#: What spoils what: a log_softmax before cross_entropy changes nothing.
_SPOILS = {
    "cross_entropy": frozenset({"softmax", "sigmoid", "logsigmoid"}),
    "binary_cross_entropy_with_logits": frozenset({"softmax", "sigmoid"}),
}
_ELEMENTWISE = frozenset({"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"})
_SUM_TOLERANCE = 1e-4


def check(subject: Subject) -> list[Check]:
    """Check the loss of the first batches with the initial model."""
    seen = observe_all(subject)
    calls = [call for s in seen for call in s.calls]
    return each(
        value=lambda: _value(subject, seen),
        logits=lambda: _logits(calls),
        softmax_before_the_loss=lambda: _squashed(calls),
        shapes=lambda: _shapes(seen, calls),
        types=lambda: _types(seen, calls),
    )


def _value(subject: Subject, seen: list[Seen]) -> Iterator[Check]:
    trouble = next((s.error for s in seen if s.error is not None), None)
    if trouble is not None:
        yield Check(Status.FAIL, f"the loss raises {type(trouble).__name__}: {trouble}")
        return
    losses = [float(s.scalar) for s in seen]
    told = subject.settings.get("expect_loss")
    if not all(map(math.isfinite, losses)):
        yield Check(
            Status.FAIL,
            f"the loss of the untrained model is {next(v for v in losses if not math.isfinite(v))}",
            code="NUM302",
            actions=("run the script under `ddpdebug run --guard stop` and replay the bundle",),
        )
    elif told is not None:
        yield _against(fmean(losses) * subject.micro_batches ** _divided(seen, subject), float(told), "the one told")
    else:
        yield _against_chance(seen, losses, loaded=bool(subject.facts.get("loaded")))


def _divided(seen: list[Seen], subject: Subject) -> int:
    """Return 1 or 0, whether the loss is divided by the number of micro-batches: it is then smaller than its call."""
    call = next((c for s in seen for c in s.calls if c.value is not None and c.value.numel() == 1), None)
    if call is None or call.value is None or subject.micro_batches == 1:
        return 0
    ratio = float(call.value) / max(abs(float(seen[0].scalar)), 1e-12)
    return int(abs(ratio - subject.micro_batches) < 1e-3 * subject.micro_batches)


def _against_chance(seen: list[Seen], losses: list[float], *, loaded: bool) -> Check:
    values, expected, floor, words = _expectation(seen)
    if not values:
        return Check(
            Status.INFO,
            f"the loss starts at {fmean(losses):.4g}; what to expect is not known (say it with --expect-loss)",
        )
    mean = fmean(values)
    high = mean > expected + max(_ABOVE * expected, _ABOVE_NATS)
    low = mean < _BELOW * floor
    summary = f"the loss of the untrained model is {mean:.4g}, expected is {expected:.4g} ({words})"
    if low and loaded:
        summary += "; weights were loaded, which know something already"
        return Check(Status.INFO, summary)
    if not (high or low):
        return Check(Status.PASS, summary)
    above = ("the last layer starts too large", "inputs of a huge scale", "reduction='sum', or a sum over positions")
    below = ("weights that are trained already (then say --expect-loss)", "the target is visible in the input")
    return Check(
        Status.WARN,
        summary,
        code="RCP801",
        evidence={"loss": mean, "expected": expected},
        hypotheses=above if high else below,
        actions=("start the last layer small: weights of deviation 0.02, bias at the log of the class frequencies",)
        if high
        else ("shuffle the labels: the loss must rise to the expected one",),
    )


def _expectation(seen: list[Seen]) -> tuple[list[float], float, float, str]:
    """Return the losses of the main call, what chance gives, the least that label frequencies allow, and the words."""
    calls = [s.calls[0] for s in seen if s.calls and len({c.name for c in s.calls}) == 1]
    calls = [c for c in calls if c.value is not None and c.settings.get("weight") is None and not _contrasts(c)]
    if len(calls) < len(seen) or len({c.name for c in calls}) != 1:
        return [], 0.0, 0.0, ""
    name = calls[0].name
    if name in _CLASSED and len({classes_of(c) for c in calls}) == 1 and (classes := classes_of(calls[0])):
        values = [_mean_value(c, max(1, kept(c).numel())) for c in calls]
        labels = Counter(int(label) for c in calls for label in kept(c).tolist())
        uniform = math.log(classes)
        smooth = f"log {classes}"
        return values, uniform, min(uniform, _entropy(labels)), smooth
    if name.startswith("binary") and all(c.settings.get("pos_weight") is None for c in calls):
        values = [_mean_value(c, max(1, c.prediction.numel())) for c in calls]
        share = fmean(float(c.target.double().mean()) for c in calls)
        return values, math.log(2), _entropy(Counter({0: share, 1: 1 - share})), "log 2"
    return [], 0.0, 0.0, ""


def _contrasts(call: LossCall) -> bool:
    """Whether the classes are the samples of the batch: what chance gives depends on how alike they are."""
    target, classes = call.target.flatten(), classes_of(call)
    return classes is not None and classes == len(target) == len(target.unique()) and classes > 1


def _mean_value(call: LossCall, count: int) -> float:
    assert call.value is not None
    return float(call.value.double().sum()) / count if call.reduction != "mean" else float(call.value)


def _entropy(counts: Counter[int]) -> float:
    total = sum(counts.values()) or 1
    return -sum(n / total * math.log(n / total) for n in counts.values() if n > 0)


def _against(loss: float, told: float, words: str) -> Check:
    off = abs(loss - told) > max(_ABOVE * abs(told), 1e-6)
    return Check(
        Status.WARN if off else Status.PASS,
        f"the loss starts at {loss:.4g}, expected is {told:.4g} ({words})",
        code="RCP801",
        evidence={"loss": loss, "expected": told},
    )


# --- what the loss is given -------------------------------------------------------------------------------------------


def _logits(calls: list[LossCall]) -> Iterator[Check]:
    judged = [c for c in calls if c.name in _ON_LOGITS and not _contrasts(c)]
    logits = [c.prediction.detach().double().flatten() for c in judged]
    if not logits:
        return
    values = torch.cat(logits)
    values = values[torch.isfinite(values) & (values > _MASKED)]
    if values.numel() < 2:
        return
    mean, std = moments(values)
    wide = std > _WIDE_LOGITS
    yield Check(
        Status.WARN if wide else Status.PASS,
        f"the logits have mean {mean:.3g} and standard deviation {std:.3g}; about 0 and 0 to 1 are usual",
        code="HLTH715",
        hypotheses=("the last layer starts too large", "the scale grows with depth (initialisation)"),
    )


def _squashed(calls: list[LossCall]) -> Iterator[Check]:
    judged = [c for c in calls if c.name in _ON_LOGITS]
    if not judged and not any(c.name == "nll_loss" for c in calls):
        return
    graph = next((c for c in judged if c.squashed in _SPOILS[c.name]), None)
    values = next((c for c in judged if graph is None and _are_probabilities(c.prediction)), None)
    wrong = next((c for c in calls if c.name == "nll_loss" and bool((c.prediction > 1e-6).any())), None)
    if graph is not None:
        summary = f"{graph.name}, which takes logits, gets what {graph.squashed} returns"
    elif values is not None:
        summary = f"{values.name}, which takes logits, gets rows that are positive and sum to 1"
    elif wrong is not None:
        summary = "nll_loss, which takes log-probabilities, gets positive values"
    else:
        yield Check(Status.PASS, "what the loss takes as logits has passed no softmax or sigmoid")
        return
    yield Check(
        Status.FAIL,
        summary,
        code="RCP802",
        hypotheses=("the model ends in a softmax or sigmoid for inference",)
        if wrong is None
        else ("the log_softmax is missing",),
        actions=("return logits, and apply softmax only where probabilities are shown",)
        if wrong is None
        else ("use cross_entropy on the logits",),
    )


def _are_probabilities(prediction: Tensor) -> bool:
    if prediction.dim() < 2 or prediction.shape[1] < 2 or not prediction.numel():
        return False
    values = prediction.detach().double()
    sums = values.sum(1)
    return bool((values >= 0).all()) and float((sums - 1).abs().max()) < _SUM_TOLERANCE


def _shapes(seen: list[Seen], calls: list[LossCall]) -> Iterator[Check]:
    pairs = [(c.name, list(c.prediction.shape), list(c.target.shape)) for c in calls if c.name in _ELEMENTWISE]
    pairs += [pair for s in seen for pair in s.broadcasts]
    wrong = next((pair for pair in pairs if _grows(pair[1], pair[2])), None)
    if wrong is not None:
        yield Check(
            Status.FAIL,
            f"the loss compares {tuple(wrong[1])} with {tuple(wrong[2])} in {wrong[0]}: every prediction with "
            "every target",
            code="RCP819",
            hypotheses=("a last dimension of 1 on one side only",),
            actions=("`output.squeeze(-1)` or `target.unsqueeze(-1)`",),
        )
    elif pairs:
        yield Check(Status.PASS, "predictions and targets have the same shape")


def _grows(one: list[int], other: list[int]) -> bool:
    """Whether (N, 1) meets (N,): both count the same samples, and the result has N x N elements."""
    one, other = sorted((one, other), key=len)
    return len(other) == len(one) + 1 and other[-1] == 1 and other[:-1] == one and bool(one) and one[-1] > 1


def _types(seen: list[Seen], calls: list[LossCall]) -> Iterator[Check]:
    notes = {
        f"{c.name} compares {dtype_name(c.prediction)} with {dtype_name(c.target)}"
        for c in calls
        if c.target.is_floating_point() and c.prediction.dtype != c.target.dtype
    }
    doubled = any(s.loss is not None and s.loss.dtype is torch.float64 for s in seen)
    notes |= {"the loss is computed in float64: a float64 tensor among targets or weights?"} if doubled else set()
    yield Check(
        Status.INFO if notes else Status.PASS,
        "; ".join(sorted(notes)) or "predictions, targets and the loss have matching types",
    )
