"""RCP819: prediction and target broadcast against each other in the loss."""

from __future__ import annotations

from typing import Any

from ddpdebug.detectors.examples import steps
from ddpdebug.detectors.kinds import EventRule, Examples, Facts, Fields, Severity
from ddpdebug.schema import announcements

_FACT = {
    "kind": "broadcast",
    "step": 0,
    "loss": "MseLoss",
    "prediction": [32, 1],
    "result": [32, 32],
    "location": "train.py:58",
}
_AXES: Fields = {
    "severity": Severity.WARNING,
    "title": "a layer without `batch_first` is given the batch first: it runs over samples instead of time",
    "phase": "batch first",
    "causes": (
        "`batch_first=True` is missing in `nn.LSTM`, `nn.GRU`, `nn.MultiheadAttention` or a transformer layer",
        "intended: attention between the samples of a batch",
    ),
    "actions": ("give the layer `batch_first=True`, or its input as (time, batch, features)",),
}

_MIXED: dict[str, Fields] = {
    "view": {
        "title": "a view or reshape before the loss mixes the classes with other dimensions",
        "causes": (
            "`view` or `reshape(-1, classes)` of (batch, classes, height, width): its rows are runs of pixels",
            "`view(batch, classes, time)` of (batch, time, classes) for a loss that wants the classes second",
            "intended: the features are no classes, and as many by chance",
        ),
        "actions": (
            "give the loss (batch, classes, ...) as it is, or `permute` the classes to the end before the view",
        ),
    },
    "softmax": {
        "title": "the softmax before the loss runs over another dimension than the classes",
        "causes": (
            "`log_softmax(x, dim=0)` normalises over the samples of the batch",
            "a softmax without `dim`, which takes the first dimension of three",
        ),
        "actions": ("`log_softmax(x, dim=1)`, or `F.cross_entropy` of the logits, which knows the dimension",),
    },
    "attention": {
        "severity": Severity.WARNING,
        "title": "attention is normalised over the queries: the weights that are added up do not add up to one",
        "causes": (
            "a softmax over another dimension of the scores than that of the keys",
            "keys and queries have changed places in the product, and not in the softmax",
            "intended: slots that compete for their inputs, without a division afterwards",
        ),
        "actions": (
            "`softmax(dim=-1)` of scores (..., queries, keys), or `F.scaled_dot_product_attention`",
            "print `weights.sum(-1)`: ones",
        ),
    },
}


def _spread(prediction: list[int], result: list[int], **more: Any) -> tuple[Facts]:
    return (Facts(topic="alone:loss", values={1: {**_FACT, "prediction": prediction, "result": result, **more}}),)


class LossBroadcast(EventRule):
    """Prediction and target broadcast, such as (N, 1) against (N,), so that the loss averages over an N x N table.

    Or one dimension is taken for another: a layer takes the samples of a batch for the steps of a sequence, a view the
    pixels for the classes, a softmax the queries of attention for its keys. Shapes fit, and nothing raises.

    Impact: every prediction is compared with every target: a squared loss then pulls all outputs to the mean of the
    batch, and the loss stops near the targets' variance.

    Diagnosis: print both shapes just before the loss. `F.mse_loss`, `F.l1_loss`, `F.smooth_l1_loss` and
    `F.huber_loss` warn about it (look for a UserWarning about the target size, often filtered out), a hand-written
    `(pred - target) ** 2` says nothing; the binary cross entropies raise.

    Causes:
    - a regression head of one output that keeps its last dimension
    - a `squeeze()` that removes too much, or only at batch size 1
    - targets collated as (N,) in one loader and (N, 1) in another
    - a mask or weight of another rank that multiplies the loss per element

    Remedy:
    - `pred.squeeze(-1)` or `target.unsqueeze(-1)` with the dimension named, and `assert pred.shape == target.shape`
      in front of each elementwise loss
    - turn the warning into an error: `warnings.filterwarnings("error", message="Using a target size")`
    """

    code = "RCP819"
    severity = Severity.ERROR
    title = "prediction and target broadcast against each other in the loss"
    events = ("loss:broadcast",)
    fires_on = Examples(
        lambda: Facts(topic="alone:loss", values={0: _FACT, 1: _FACT}),
        lambda: (*steps(2), *_spread([32], [32, 32])),
        lambda: _spread([2, 1], [2, 2]),
        lambda: _spread([32, 10, 8], [], layer="LSTM"),
        lambda: _spread([8, 4, 16, 16], [2048, 4], mixed="view"),
        lambda: _spread([8, 16, 16], [], mixed="attention", summed=[2]),
    )
    silent_on = Examples(
        lambda: steps(3),
        lambda: _spread([32, 1], [32, 31]),  # several targets for each sample
        lambda: _spread([32], [1, 32]),
        lambda: _spread([1], [1, 1]),
        lambda: _spread([32, 1], [32, 32], explicit=True),  # all pairs
        lambda: _spread([32, 1, 8], [32, 32, 8]),
        lambda: Facts(
            topic="alone:loss",
            values={0: {"kind": "range", "step": 0, "loss": "BinaryCrossEntropy", "low": 0, "high": 9}},
        ),
    )

    def judge(self, fact: announcements.LossBroadcast) -> Fields | None:
        if fact.mixed is not None:
            what = {"view": "output_of_the_layer", "softmax": "softmax_of", "attention": "weights"}[fact.mixed]
            shown = {what: list(fact.prediction), "given_to_loss": list(fact.result), "summed_over": list(fact.summed)}
            evidence = {name: value for name, value in shown.items() if value}
            return {"subject": (fact.loss,), "phase": fact.mixed, "evidence": evidence, **_MIXED[fact.mixed]}
        if fact.layer is not None:
            return {"subject": (fact.layer,), "evidence": {"input": list(fact.prediction)}, **_AXES}
        rows, columns = fact.result if len(fact.result) == 2 else (0, 0)
        if fact.explicit or not 1 < rows == columns or fact.prediction not in {(rows,), (rows, 1)}:
            return None
        evidence = {"prediction": list(fact.prediction), "averaged_over": list(fact.result)}
        return {"subject": (fact.loss,), "evidence": evidence}
