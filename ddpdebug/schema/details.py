"""What ranks tell each other beyond the row: details on suspicion, announcements once. Torch-free.

Both are JSON values that a rank builds from what it kept in a short ring; both travel in the exchange's variable part.
Digests are written as 16 hex digits, so that JSON does not round them. This module is the one place that says what
they look like.

Details of one step (kind -> JSON of one rank):

`parameters`  {"before": {name: hex}, "after": {name: hex}, "previous": {name: hex}, "foreign": {name: hex},
              "frozen": {name: hex}, "order": [name, ...], "loads": [{"location": "train.py:88", "what": "GPT"}],
              "norms": {name: float} after the step, only with a tolerance}
              `previous` is what this rank's last step left behind; `before` is what this step found.
`gradients`   {"digests": {name: hex}, "foreign": {name: hex}, "missing": [name, ...],
              "local_sums": {name: float}, "local_norms": {name: float}, "reduced_sums": {name: float},
              "reduced_norms": {name: float}, "step_norms": {name: float}}
`contract`    facts of the DDP contract, as this rank's code used it around this step:
              {"ddp": int (number of DDP wrappers), "world": int, "groups": [[0, 1], ...] one per wrapper,
               "bypass": {"location": "train.py:60" | null} | null,
               "no_sync": null | {"kind": "last-micro-batch" | "forward-only" | "flag-after-forward", "location": ...},
               "unreduced": {name: "unfrozen" | "added" | "replaced" | "retyped" | "never-wrapped"},
               "gathered": [{"location": ..., "shapes": [[8, 16]]}]  all_gather of tensors that require grad,
               "clips": [{"norm": float, "max": float, "before_sync": bool, "location": ...}],
               "hook": null | "user.module.function", "find_unused": bool,
               "ignored": [name, ...], "location": "train.py:70" of the optimizer step}
`hyper`       [{"lr": 0.1, "betas": [0.9, 0.999], ..., "params": "4 parameters, <hex>"}, ...]  one per parameter group
`state`       {name: {key: hex}} after the step; with a tolerance the key "" has {"name:key": float}, the tensors' norms
`buffers`     {"digests": {name: hex}} after the broadcast
`modes`       {module path: true (train) | false}
`replicas`    {replica name: {"digest": hex, "tensors": {name: hex}, "changed": bool, "used": bool}}
`numerics`    what was seen of non-finite numbers in this step; {} when nothing was:
              {"checked": bool (module outputs were looked at), "compiled": bool (not, because of torch.compile),
               "loss": null | {"value": float, "micro_batch": int, "backward": "train.py:60", "expression":
                       "train.py:58" | null (the assignment that made it), "operation": "LogBackward0" | null,
                       and where the operation's result could be computed once more: "value": "nan" | "inf",
                       "operands": [...], "brought": true where one of them has no gradient and was bad already,
                       its line as far as the source shows it: "location": "loss.py:12" | null, "line_found": how, or
                       "candidates": ["loss.py:12", ...] where it may be one of several},
               "loss_line": null | "train.py:58"   of a finite loss whose gradient is non-finite,
               "loss_backward": null | {"operation": ..., "value": ..., "operands": ..., "location": ...} as in `loss`:
                       the operation of a finite loss whose backward makes its gradient non-finite,
              "forward": [{"module": path, "caller": path | null, "class": str, "micro_batch": int,
                           "call": int (of this module in this forward), "order": int (of the call in this forward),
                           "output": int, "dtype": str, "shape": [int], "kinds": ["NaN", "+Inf", "-Inf"],
                           "count": int | null, "range": [low, high] | null of the finite part,
                           "input_range": [low, high] | null, "input_nonfinite": bool | null,
                           "usual": bool (so in healthy steps as well)}, ...],
              "output_finite": bool | null,
               "inputs": [{"argument": "x" | "batch['x']" | "args[0]", "dtype": str, "shape": [int], "kinds": [...],
                           "count": int, "samples": [int] along dimension 0}],
               "entry": null | {"finite": bool, "range": [low, high]}   gradient that enters the model from the loss,
               "local": [name, ...]   own gradients that were non-finite, in the order in which backward made them,
               "reduced": [name, ...]   gradients that were non-finite at the step,
               "largest": {name: float}   largest magnitude of own gradients, where a hook or 16 bits reduce them,
               "parameters": {"before": [name, ...], "after": [name, ...], "state": [[name, key], ...],
                              "phase": "optimizer" | "outside-optimizer" | null (who made those found before)},
               "near": [{"module": path, "dtype": str, "largest": float, "limit": float,
                         "history": [[step, largest], ...]}],
               "replay": null | what the replay of the step has found}
`holders`     {"holders": [{"name": "losses", "kind": "list", "entries": int | null, "function": "train" | null,
              "location": "train.py:58", "graphs": int, "tensors": int, "bytes": int}], "visits": int} of the one rank
              that searched (forensics/memory/holders.py); `graphs`: steps whose autograd graphs hang there
`layers`      statistics of a sampled step, of a bounded number of modules and parameters; {} elsewhere:
              {"modules": {path: {"class": str, "role": "output" | "input" (of a module whose input is a functional
                       activation), "call": int, "kind": "relu" | "sigmoid" | "tanh" | "softmax" | null, "leaf": int
                       (place in the forward), "mean": float, "std": float, "hidden": bool (other weights follow),
                       "zero": share, "zero_units": share of units that were 0 for all inputs of the last samples,
                       "inputs": int (how many those were), "saturated": share}},
               "parameters": {name: {"norm": float, "grad_norm": float | null, "update": norm of the change,
                       "digest": hex before the step, "numel": int, "dim": int, "lr": float | null,
                       "symmetric": bool (first sample only)}}  of rank 0 only,
               "order": [name, ...] from the first layer to the last}
`recipe`      what the training loop did around this step, with the keys that a flag of the step asks for:
              {"modes": {"modules": [path, ...], "location": "train.py:40"} of the forwards in eval mode,
               "carried": {"location": "train.py:70"} of the step with gradients that were not cleared,
               "discarded": {"kind": "all" | "micro-batches", "count": int, "location": "train.py:61" | null},
               "twice": {"other": class name, "names": [name, ...]} of the optimizer that stepped before,
               "clip": {"location": ..., "scale": float}, "scheduler": {"class": str, "calls": int, "micro_batches":
               int, "location": ...}, "elsewhere": {"kind": "scheduler" | "attribute", "class": str, "location": ...},
               "accumulation": {"micro_batches": int, "location": ..., "loss": "MseLoss"},
               "label": int the only class among the labels of this step, "lr": [float, ...] of the groups}

Announcements (topic -> JSON of one rank), compared once all ranks have spoken:

`structure:<k>`  {"digest": hex, "entries": [...], "group": [rank, ...]} of the k-th DDP before it was wrapped
`init:<k>`       {"digests": {name: hex}} parameters and buffers of the k-th DDP before DDP broadcast rank 0's
`loader:<k>`     {"sampler": class name, "distributed": bool, "replicas": int, "rank": int, "seed": int, "epoch": int,
                 "shuffle": bool, "drop_last": bool, "length": int, "batch_size": int, "iterations": int,
                 "attributes": {attribute path: hex}, "indices": {"digest": hex, "length": int} | null,
                 "batches": int | null, "step": int, "workers": int, "dataset": "Pairs at data.py:12" | null}
                 sent again at the start of each epoch over the k-th DataLoader
`precision:<k>`  {"step": int, "autocast": dtype | null, "matmul": precision | null} at the k-th DDP's first training
                 forward
`constants:<k>`  {"step": int, "tensors": {attribute path: "(shape):hex"}} floating-point tensors in plain attributes of
                 the k-th DDP's modules, as they were when it was wrapped, that its first training forwards left as they
                 were
`equivalence`    {"world": int, "step": int | null, "quantity": "gradient" | "parameter", "off": {name: [ratio, rest,
                 difference]}, "bound": float, "compared": int, "dtype": str, "batch_norm": bool, "without_batch_norm":
                 "agree" | "differ", "shards": "ranks" | "batch"} by `ddpdebug equivalence` only, see equivalence.py
`place`          {"node": str, "local_rank": int, "metrics": url | null} at the start, {"gpu_uuid": str} with the first
                 step on a GPU; nothing is judged by it
`alone:failure`  {"reason": "...", "step": int, "missing": [name, ...]} by a rank that ends with an exception; judged at
                 once, because the others may never speak
`alone:memory`   what an out-of-memory summary holds (forensics/memory/oom.py): {"failed": bool, "step": int, "phase":
                 str, ...} by the rank whose allocation failed, and then by the others, with `failed` false
`alone:loss`     {"kind": "double-softmax" | "broadcast" | "range" | "initial" | "labels", "step": int, ...} what the
                 autograd graph of a loss shows, see probes/training_loop/loss_graph.py
`alone:audit`    {"step": int, "kind": "missing" | "frozen" | "detached" | "unregistered" | "no_grad", ...} parameters
                 that are not trained as they seem to be, see probes/training_loop/parameter_ownership.py
`alone:validation`  {"step": int, "forwards": int, "since": int, "location": "train.py:88"} forwards without gradients
                 that ran in train mode
`alone:chance`   {"step": int, "function": "dropout", "p": float | null, "module": path, "class": str, "location": ...,
                 "others": ["dropout at train.py:17", ...]} dropout functions that were active inside modules in eval
                 mode, see probes/training_loop/eval_dropout.py
`alone:leak`     {"step": int, "kind": "moved" | "same" (targets beside inputs), "change": float, "module": path | null,
                 "position": int, "length": int, "first_loss": float, "loss": float} see forensics/target_leak.py
`alone:schedule` {"step": int, "class": str} a scheduler that nothing had stepped when the run came to its end
`alone:evaluation`  {"step": int, "location": "train.py:88" | null, "samples": int | null, "batches": int, "source":
                 "by nn.MSELoss"} of the line whose losses without gradients, in eval mode, are the validation loss from
                 here on; `samples` of the data set that was begun last. Said again when another line takes its place
`inputs:<k>`     {"step": int, "layer": class name, "mean": float, "std": float, "min": float, "max": float, "twice":
                 bool (as if divided by 255 two times)} of what the k-th DDP's first layer with weights is given in its
                 first training forwards
`group:<k>`      {"ranks": [int, ...]} over which the k-th DDP reduces
`gathered:<n>`   {"location": "train.py:88", "shapes": [[int, ...], ...]} of the n-th list of tensors that were gathered
                 from all ranks without a gradient, before a backward
`agreement:<n>`  {"step": int, "output": hex, "weights": hex} of the model, fed the n-th batch that `agree` was given
`coverage`       what was looked at on this rank, see coverage.py: {"rank": int, "steps": int, "made": int, "backwards":
                 int, "wrappers": int, "parameters": int, "unwatched": {why: int}, "left_out": {why: int}, "off": {part:
                 message}, "children": int, "evaluations": int}
`growth`         [{"what": str, "bytes": int | null}, ...] growth that the user has declared (`expect_growth`)
`end`            {"steps": {optimizer: int}, "reason": "finished" | "stopped" | "interrupted" | "exception: ...",
                 "last_states": int} the number of rows with `Flag.LAST_STATE` that the rank has sent
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Everything a rank can be asked for about a past step.
KINDS = (
    "parameters",
    "gradients",
    "contract",
    "hyper",
    "state",
    "buffers",
    "modes",
    "replicas",
    "numerics",
    "layers",
    "holders",
    "recipe",
)


def hex_digest(value: int) -> str:
    """Return a digest as it is written in details."""
    return f"{value:016x}"


def differing_names(by_rank: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Return the names whose values are not equal on all ranks (absent counts as a value), in the order first seen."""
    order: dict[str, None] = {}
    for table in by_rank.values():
        order.update(dict.fromkeys(table))
    missing = object()
    result = []
    for name in order:
        values = [table.get(name, missing) for table in by_rank.values()]
        if any(value != values[0] for value in values[1:]):
            result.append(name)
    return result
