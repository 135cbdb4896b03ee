"""Sampled steps: their statistics are asked for whatever was found, and of no other step."""

from __future__ import annotations

from ddpdebug.detectors.hlth.hlth703_dead_units import DeadUnits
from ddpdebug.detectors.hlth.hlth714_zero_gradient import ZeroGradient
from ddpdebug.detectors.hlth.samples import activation, parameters, ratios, sampled, sites, update_ratio, weight
from ddpdebug.diagnosis.engine import Diagnosis
from ddpdebug.schema.announcements import SoftmaxOfOne
from ddpdebug.schema.details import LayerStatistics
from ddpdebug.schema.finding import Severity


def test_every_sample_is_asked_for_even_when_nothing_or_everything_was_found() -> None:
    """Other details are asked for less and less; these describe a step and not a suspicion."""
    for share in (0.1, 0.9):
        steps = sampled(12, modules=lambda i, share=share: {"act": activation("relu", zero_units=share)})  # type: ignore[misc]
        diagnosis = Diagnosis(world=2, detectors=[DeadUnits()])
        asked, told = [], []
        for step in steps:
            for request in diagnosis.feed(step):
                asked.append((request.step, request.kind))
                for rank in range(2):
                    diagnosis.answer(rank, 0, request.step, request.kind, step.details["layers"][rank])
            told += diagnosis.tick()
        assert asked == [(number, "layers") for number in range(12)]
        assert len([finding for finding, is_new in told if is_new]) == (share > 0.5)


def test_a_step_without_a_sample_is_not_asked_about() -> None:
    """The row says whether there is one."""
    (step,) = sampled(1)
    bare = {rank: row._replace(update_norm=float("nan")) for rank, row in step.rows.items()}
    rule = DeadUnits()
    assert rule.suspects(step)
    assert not rule.suspects(type(step)(step=0, optimizer=0, world=2, rows=bare))


def test_tables_are_read_from_who_tells_them() -> None:
    """Parameters from rank 0, in order; activations that all who tell any have seen; a ratio where it is known."""
    table = {"b": weight(), "a": weight(update=0.04), "bias": weight(dim=1), "zero": weight(norm=0.0)}
    (step,) = sampled(1, lambda _: table, lambda _: {"act": activation("tanh")})
    assert list(parameters(step)) == ["b", "a", "bias", "zero"]
    assert ratios(step) == {"b": 0.001, "a": 0.01}
    assert update_ratio(step) == 0.001
    assert [len(seen) for seen in sites(step).values()] == [2]
    assert parameters(step.with_details({"layers": {}})) == {}
    assert sites(step.with_details({"layers": {0: LayerStatistics()}})) == {}


def test_zero_gradients_are_an_error_where_the_loss_is_known_to_be_constant() -> None:
    """And the loss's line is named; a softmax over one entry beside other terms, or zeros of unknown cause, are not."""
    one = SoftmaxOfOne(operation="LogSoftmax", shape=(32, 1), location="train.py:31")
    for fact, other, severity in (
        (one, 0.0, Severity.ERROR),
        (one, 0.1, Severity.WARNING),
        (None, 0.0, Severity.WARNING),
    ):
        rule, found = ZeroGradient(), []
        if fact is not None:
            assert list(rule.compare(fact.topic, {0: None, 1: fact})) == []
        for step in sampled(24, lambda _: {"w": weight(grad_norm=0.0), "v": weight(grad_norm=other)}):  # noqa: B023
            found += list(rule.detect(step))
        (finding,) = found
        assert finding.severity is severity
        assert finding.location == ("train.py:31" if severity is Severity.ERROR else None)
