"""NUM305: the input batch is non-finite."""

from __future__ import annotations

from ddpdebug.detectors.examples import step_at, steps
from ddpdebug.detectors.kinds import Examples, Step, Verdict
from ddpdebug.detectors.num.nonfinite import NonfiniteRule, call, has, known_of, ranks_with, seen
from ddpdebug.detectors.num.num304_nonfinite_parameter import NonfiniteParameter
from ddpdebug.schema.details import Numerics
from ddpdebug.schema.row import Flag

_INPUT = {"argument": "x", "dtype": "float32", "shape": [4, 8], "kinds": ["NaN"], "count": 1, "samples": [2]}
_CALLS = [call("embed", 1, input_nonfinite=True)]
_SEEN = {1: seen(inputs=[_INPUT], forward=_CALLS, output_finite=False)}
_LOST = Flag.LOSS_NONFINITE | Flag.FORWARD_NONFINITE | Flag.INPUT_NONFINITE


class NonfiniteInput(NonfiniteRule):
    """An argument of the model's forward holds nan or inf before any layer has run.

    Impact: one bad sample turns the gradients of all ranks into nan in the same step.

    Diagnosis: take the sample indices of the finding, map them to files or rows through the sampler's order of that
    rank and epoch, and load exactly these with `dataset[i]`. Check once without augmentation and once with; then check
    the raw file. Missing values that the model handles on purpose (nan-coded features that it masks) are no fault.

    Causes:
    - missing values in the raw data that were read as nan
    - normalisation by a zero standard deviation or a zero maximum: a constant column, a black image, a silent clip
    - an augmentation or feature that takes log or divides, for a rare input
    - a conversion to float16 in the loader or in collate that overflows

    Remedy:
    - repair or drop the sample in the dataset, not in the training step
    - normalise with `std.clamp(min=eps)` from fixed training statistics
    - add an `isfinite` test over the data set to preflight, and let collate raise with the sample's id
    - if a batch must be skipped in training, all ranks have to skip it together, or the reductions fall out of step
    """

    code = "NUM305"
    title = "the input batch is already non-finite"
    after = NonfiniteParameter
    fires_on = Examples(
        lambda: (step_at(7, odd={1: {"flags": _LOST}}, numerics=_SEEN), step_at(8, flags=Flag.LOSS_NONFINITE)),
        lambda: step_at(7, odd={1: {"flags": Flag.LOCAL_GRADS_NONFINITE}}, numerics={1: seen(inputs=[_INPUT])}),
    )
    silent_on = Examples(
        lambda: steps(3),
        lambda: step_at(7, odd={1: {"flags": Flag.INPUT_NONFINITE}}, numerics={1: seen(inputs=[_INPUT])}),
        lambda: step_at(7, flags=Flag.SKIPPED, odd={1: {"flags": _LOST}}, numerics=_SEEN),
    )

    @classmethod
    def verdict(cls, step: Step) -> Verdict | None:
        known = known_of(step)

        def guilty(rank: int, told: Numerics) -> bool:
            harmed = Flag.LOSS_NONFINITE | Flag.LOCAL_GRADS_NONFINITE
            return bool(told.inputs) and has(step, rank, harmed)

        ranks = ranks_with(step, known, guilty)
        if not ranks:
            return None
        first = {rank: known[rank].inputs[0] for rank in ranks}
        evidence = {
            "samples": {str(rank): list(entry.samples) for rank, entry in first.items()},
            "kinds": sorted({kind for entry in first.values() for kind in entry.kinds}),
            "elements": {str(rank): entry.count for rank, entry in first.items()},
            "shape": list(first[ranks[0]].shape),
            "dtype": first[ranks[0]].dtype,
        }
        names = tuple(dict.fromkeys(entry.argument for rank in ranks for entry in known[rank].inputs))
        return Verdict(ranks=ranks, subject=names, phase="input", evidence=evidence)
