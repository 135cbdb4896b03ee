"""Names of autograd nodes by which ddpdebug recognises graphs, each with an operation that makes the node.

The names are torch's own and change with its operations. `unmade` lets a real graph show which of them this torch still
makes; it computes a little, so `ddpdebug doctor` and the tests ask it, never a job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.nn import functional
from torch.utils import checkpoint

from ddpdebug.torch_internals.lookup import Feature, register

_LABELS = (0, 1)

Make = Callable[[torch.Tensor], torch.Tensor]


def _labels() -> torch.Tensor:
    return torch.tensor(_LABELS)


def _deep(x: torch.Tensor) -> torch.Tensor:
    return torch.ones(2, 2, 2) @ x


def _far(x: torch.Tensor) -> torch.Tensor:
    return torch.cdist(torch.ones(30, 2) * x[0], torch.ones(30, 2))


def _attended(x: torch.Tensor) -> torch.Tensor:
    return functional.scaled_dot_product_attention(x, x, x)


_LOSS: Mapping[str, Make] = {
    "NllLossBackward0": lambda x: functional.nll_loss(x, _labels()),
    "NllLoss2DBackward0": lambda x: functional.nll_loss(x[None], _labels()[None]),
    "LogSoftmaxBackward0": lambda x: x.log_softmax(0),
    "BinaryCrossEntropyBackward0": lambda x: functional.binary_cross_entropy(x, x.detach()),
    "BinaryCrossEntropyWithLogitsBackward0": lambda x: functional.binary_cross_entropy_with_logits(x, x.detach()),
    "MseLossBackward0": lambda x: functional.mse_loss(x, x.detach()),
    "SmoothL1LossBackward0": lambda x: functional.smooth_l1_loss(x, x.detach()),
    "HuberLossBackward0": lambda x: functional.huber_loss(x, x.detach()),
    "SoftMarginLossBackward0": lambda x: functional.soft_margin_loss(x, x.detach()),
    "MeanBackward0": lambda x: x.mean(),
    "SumBackward0": lambda x: x.sum(),
    "MeanBackward1": lambda x: x.mean(0),
    "SumBackward1": lambda x: x.sum(0),
    "AddBackward0": lambda x: x + x,
    "StackBackward0": lambda x: torch.stack([x, x]),
    "ToCopyBackward0": lambda x: x.double(),
    "SqueezeBackward0": lambda x: x[None].squeeze(),
    "SqueezeBackward1": lambda x: x[None].squeeze(0),
    "SqueezeBackward2": lambda x: x[None].squeeze((0,)),
    "DivBackward0": lambda x: x / 2,
    "MulBackward1": lambda x: functional.cross_entropy(x.reshape(1, -1), torch.tensor([0]), label_smoothing=0.1),
    "MaskedFillBackward0": lambda x: x.masked_fill(x > 0, 0.0),
    "NativeDropoutBackward0": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "DivBackward1": lambda x: functional.cross_entropy(x.reshape(1, -1), torch.ones(1, x.numel())),
    "MulBackward0": lambda x: x * 2,
    "NegBackward0": lambda x: -x,
    "SubBackward0": lambda x: x - x.detach(),
    "RsubBackward1": lambda x: 1 - x,
    "ExpandBackward0": lambda x: x.expand(3, 2, 2),
    "UnsqueezeBackward0": lambda x: x.unsqueeze(0),
    "ViewBackward0": lambda x: x.view(-1),
    "ReshapeAliasBackward0": lambda x: torch.ops.aten._reshape_alias(x, [4], [1]),
    "UnsafeViewBackward0": _deep,
    "TransposeBackward0": lambda x: x.transpose(0, 1),
    "PermuteBackward0": lambda x: x.permute(1, 0),
    "TBackward0": lambda x: x.t(),
    "CloneBackward0": lambda x: x.clone(),
    "SliceBackward0": lambda x: x[0:1],
    "SelectBackward0": lambda x: x[0],
    "IndexBackward0": lambda x: x[_labels()],
    "AliasBackward0": torch.ops.aten.alias,
    "PowBackward0": lambda x: x**2,
    "PowBackward1": lambda x: x**x,
    "AbsBackward0": lambda x: x.abs(),
    "WhereBackward0": lambda x: torch.where(x > 0, x, x),
    "ClampBackward0": lambda x: x.clamp(x.detach(), x.detach()),
    "ClampBackward1": lambda x: x.clamp(0, 1),
    "ClampMinBackward0": lambda x: x.clamp_min(0),
    "ClampMinBackward1": lambda x: x.clamp_min(x.detach()),
    "SqrtBackward0": lambda x: x.sqrt(),
    "ExpBackward0": lambda x: x.exp(),
    "LogBackward0": lambda x: x.log(),
    "ReluBackward0": lambda x: x.relu(),
    "SigmoidBackward0": lambda x: x.sigmoid(),
    "TanhBackward0": lambda x: x.tanh(),
    "SoftmaxBackward0": lambda x: x.softmax(0),
    "ScaledDotProductFlashAttentionForCpuBackward0": lambda x: _attended(x[None, None]),
}
#: Of these the kind is enough: the line of the source is looked for that makes such a node.
_KINDS: Mapping[str, Make] = {
    "LinalgVectorNormBackward0": torch.linalg.vector_norm,
    "NormBackward1": lambda x: functional.pairwise_distance(x, x.detach()),
    "AcosBackward0": lambda x: x.acos(),
    "AcoshBackward0": lambda x: (x + 1).acosh(),
    "AsinBackward0": lambda x: x.asin(),
    "AtanhBackward0": lambda x: x.atanh(),
    "AddmmBackward0": lambda x: torch.addmm(x, x, x),
    "BaddbmmBackward0": lambda x: torch.baddbmm(x[None], x[None], x[None]),
    "BmmBackward0": lambda x: x[None].bmm(x[None]),
    "CatBackward0": lambda x: torch.cat([x, x]),
    "CdistBackward0": lambda x: torch.cdist(x, x),
    "ClampMaxBackward0": lambda x: x.clamp_max(0),
    "DotBackward0": lambda x: x[0].dot(x[0]),
    "ErfinvBackward0": lambda x: x.erfinv(),
    "EuclideanDistBackward0": _far,
    "Exp2Backward0": torch.exp2,
    "FmodBackward0": lambda x: x.fmod(2),
    "LogcumsumexpBackward0": lambda x: x.logcumsumexp(0),
    "MmBackward0": lambda x: x @ x,
    "MvBackward0": lambda x: x.mv(x[0]),
    "NansumBackward0": lambda x: x.nanmean(),
    "PowBackward2": lambda x: 2**x,
    "ReciprocalBackward0": lambda x: 1 / x,
    "RemainderBackward0": lambda x: x % 2,
    "StdBackward0": lambda x: x.std(),
    "StdMeanBackward0": lambda x: torch.std_mean(x)[0],
    "VarBackward0": lambda x: x.var(),
    "VarMeanBackward0": lambda x: torch.var_mean(x)[0],
    "XlogyBackward0": lambda x: torch.xlogy(x, x),
}
_CHECKPOINT: Mapping[str, Make] = {
    "CheckpointFunctionBackward": lambda x: _tensor(checkpoint.checkpoint(torch.neg, x, use_reentrant=True))
}
#: Every name, with an operation on a tensor of 2 x 2 numbers between 0 and 1 that makes the node.
NODES: Mapping[str, Make] = {**_LOSS, **_KINDS, **_CHECKPOINT}


def _tensor(value: Any) -> torch.Tensor:
    assert isinstance(value, torch.Tensor)
    return value


def kinds() -> frozenset[str]:
    """Return the operations of the nodes, in lower case: `nllloss2d` for `NllLoss2DBackward0`."""
    return frozenset(name.partition("Backward")[0].lower() for name in NODES)


def made_by(make: Make) -> Iterator[str]:
    """Yield the names of the nodes that an operation makes."""
    with torch.enable_grad(), torch.autocast("cpu", enabled=False):
        start = torch.full((2, 2), 0.5, dtype=torch.float32, device="cpu", requires_grad=True)
        made = make(start)  # in torch 2.12 the node of a function in Python has no name without its result
        waiting = [made.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None:
            yield node.name()
            waiting += [below for below, _ in node.next_functions]


def is_made(name: str) -> bool:
    """Whether this torch makes a node of that name."""
    try:
        return name in set(made_by(NODES[name]))
    except (AttributeError, RuntimeError, TypeError):  # the operation is gone, or takes other arguments
        return False


def _registered(feature: Feature, names: Mapping[str, Make]) -> None:
    for name in names:

        def found(name: str = name) -> bool:
            return is_made(name)

        register(f"autograd node {name}", feature, found=found, by_doctor=True)


_registered(Feature("nodes of losses", "what is around this node in a loss is not recognised"), _LOSS)
_registered(Feature("nodes by their lines", "the line that makes this node is not found by it"), _KINDS)
_registered(
    Feature("nodes of checkpointing", "the backward of a replay runs outside of what re-entrant checkpointing needs"),
    _CHECKPOINT,
)
