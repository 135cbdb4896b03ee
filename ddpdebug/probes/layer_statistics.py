"""Per-layer statistics of a few checked steps: activations, weights, gradients and updates by depth.

Everything is bounded: so many modules and parameters, so many elements of each, so few steps. Nothing waits for a
device: numbers stay where they are until the background thread reads them.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ddpdebug import torch_internals as internals
from ddpdebug.nested import tensors_in
from ddpdebug.probes import async_copy as device, ranges
from ddpdebug.probes.nonfinite_notes import Looks
from ddpdebug.probes.optimizers import OptimizerWatch
from ddpdebug.probes.record import Part, SinceLastStep, StepRecord
from ddpdebug.probes.training_loop.loss_graph import FORM, scaled_by
from ddpdebug.schema.details import LayerActivation, LayerParameter, LayerStatistics, hex_digest
from ddpdebug.schema.row import Flag
from ddpdebug.torch_internals import graph

#: At most so many module calls and parameters are described, and at most so many elements of each are read.
MAX_CALLS, MAX_PARAMETERS, MAX_ELEMENTS = 64, 100, 1 << 14
#: Ranks from this one on say nothing of their activations: a few batches show the same as many.
_RANKS = 2
#: Of each activation the units that fired are remembered for so many samples.
_SAMPLES = 4
_MAX_SITES = 256
#: The first samples are taken in a row; later ones at doubling distances, but in one of so many checked steps.
_FIRST, _RAREST = 4, 64
#: Of the first samples it is told how far units differ between inputs: the number of the last one.
_BEGINNING = 1
#: A sigmoid or tanh this close to a limit, and a softmax with an entry this large, are at the end of their range.
_END = 0.01
_KINDS = {
    "ReluBackward0": "relu",
    "SigmoidBackward0": "sigmoid",
    "TanhBackward0": "tanh",
    "SoftmaxBackward0": "softmax",
}
#: Nodes of a forward's graph that are gone through for a softmax that no module returns; 2 microseconds each.
_MAX_NODES = 2048
#: Nodes that multiply with the weights that a softmax makes, and those that may stand between.
_WEIGHING = frozenset({"BmmBackward0", "MmBackward0", "MulBackward0", "NativeDropoutBackward0"})
#: Nodes that scale or mask scores before their softmax, beside those that change their form; so many are gone through.
_ON_SCORES = frozenset({"MulBackward0", "DivBackward0", "MaskedFillBackward0", "WhereBackward0"})
_MAX_BEFORE = 8
_MIN_ROWS, _MAX_ROWS, _MAX_COLUMNS = 4, 64, 256


def is_due(count: int) -> bool:
    """Return whether the `count`-th checked step is sampled."""
    return count < _FIRST or count % min(_RAREST, 1 << (count.bit_length() - 3)) == 0


@dataclass(slots=True)
class LayerSamples(Part, key="probe:layers"):
    """The statistics by layer of one step; the numbers may still be on a device."""

    calls: list[dict[str, Any]] = field(default_factory=list)  # values are positions in `numbers` where they are floats
    numbers: device.LaterFloats = list
    order: dict[int, int] = field(default_factory=dict)  # id of a module with parameters -> place of its first call
    names: list[str] = field(
        default_factory=list
    )  # the parameters that are described, from the first layer to the last
    facts: list[dict[str, Any]] = field(default_factory=list)
    norms: device.LaterFloats = list  # of the weights' blocks, then of their changes, then of their symmetry
    _tables: tuple[list[float], list[float]] | None = None

    def read(self) -> tuple[list[float], list[float]]:
        """Return the norms of weights and of their changes, scaled up from sampled blocks."""
        if self._tables is None:
            values = self.norms()
            if len(values) < 2 * len(self.names):
                self.names, self.facts = [], []  # the step did not happen
            count = len(self.names)
            scale = [math.sqrt(fact["numel"] / max(1, fact["block"])) for fact in self.facts]
            weights = [v * s for v, s in zip(values[:count], scale, strict=True)]
            updates = [v * s for v, s in zip(values[count : 2 * count], scale, strict=True)]
            for fact, value in zip(self.facts, values[2 * count :], strict=False):
                fact["symmetric"] = bool(value)
            self._tables, self.norms = (weights, updates), list
        return self._tables

    def let_go(self) -> None:
        """Keep numbers instead of tensors."""
        values = self.numbers()
        self.numbers = lambda: values

    def columns(self, _: StepRecord) -> dict[str, Any]:
        """Return the norms of the weights and of their changes."""
        weights, updates = self.read()
        return {"param_norm": math.hypot(*weights), "update_norm": math.hypot(*updates)} if weights else {}

    def detail(self, gradients: Mapping[str, float], before: Mapping[str, int]) -> LayerStatistics:
        """Return the `layers` detail.

        Args:
            gradients: norms of the gradients that the optimizer used, by parameter.
            before: digests of the parameters before the step, by parameter.
        """
        values = self.numbers()
        modules: dict[str, LayerActivation] = {}
        for call in self.calls:
            about: dict[str, Any] = {k: _shown(values[v.at]) if isinstance(v, _Number) else v for k, v in call.items()}
            path = about.pop("path")
            modules[path] = LayerActivation(**about)
        weights, updates = self.read()
        parameters: dict[str, LayerParameter] = {}
        for name, fact, weight, update in zip(self.names, self.facts, weights, updates, strict=True):
            digest = before.get(name)
            parameters[name] = LayerParameter(
                norm=_shown(weight),
                grad_norm=_shown(gradients[name]) if name in gradients and fact["given"] else None,
                update=_shown(update),
                digest=None if digest is None else hex_digest(digest),
                **{key: value for key, value in fact.items() if key not in {"block", "given"}},
            )
        return LayerStatistics(modules=modules, parameters=parameters, order=tuple(self.names))


@dataclass(frozen=True, slots=True)
class _Number:
    at: int


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """A module call. Only the part that is read was copied as it ran.

    Between the model's own operations little of our code is in the caches, and each line takes several times as long as
    in a loop at the end of the forward.
    """

    module: torch.nn.Module
    about: dict[str, Any]
    part: torch.Tensor
    result: internals.Seen  # dead once its memory may be used again
    memory: int  # where it lies
    convolution: bool  # the last layer with weights was one
    sequence: int  # of the node that made it, -1 without one


def _shown(value: float) -> float | None:
    """Return a number short enough for JSON; None where it is no number."""
    return float(f"{value:.5g}") if math.isfinite(value) else None


class Layers:
    """The probe that takes layer samples."""

    def __init__(self) -> None:
        self.sampling = False
        self._count, self._number = -1, -1
        self._notes = LayerSamples()
        self._calls: list[_Call] = []
        self._numbers: list[torch.Tensor] = []
        self._seen: dict[int, tuple[internals.Seen, int | None]] = {}
        self._times: dict[int, int] = {}
        self._stride, self._leaves, self._convolution = 1, 0, False
        self._only: frozenset[int] | None = None  # numbers of the modules that are described; None takes some in order
        self._alive: dict[str, deque[tuple[int, torch.Tensor]]] = {}
        self._blocks: list[torch.Tensor] = []
        self._symmetry: list[torch.Tensor] = []
        self._begun: set[int] = set()
        self._described: tuple[int, tuple[int, ...], list[str]] | None = None  # of an optimizer, with its table's key

    # --- forward ------------------------------------------------------------------------------------------------------

    def begin(
        self, since: SinceLastStep, root: torch.nn.Module, layers: Sequence[torch.nn.Module] | None = None
    ) -> bool:
        """Decide whether to sample a checked training forward; return whether its module calls are needed.

        Args:
            layers: the calls of these alone are seen, of a model of many modules.
        """
        if since.number != self._number:
            self._number, self._count = since.number, self._count + 1
        self.sampling = is_due(self._count)
        if not self.sampling or since.parts[Looks].forwards:
            return False
        self.forget()
        self._notes = LayerSamples()
        rank = dist.get_rank() if dist.is_initialized() else 0
        self._only = None if layers is None else frozenset(map(id, layers))
        parts = internals.modules(root) if layers is None else layers
        self._stride, self._leaves = max(1, math.ceil(sum([internals.is_leaf(part) for part in parts]) / MAX_CALLS)), 0
        return rank < _RANKS

    def look(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """Take the statistics of one module call; containers pass on their children's outputs and are skipped."""
        if not internals.is_leaf(module) or (self._only is not None and id(module) not in self._only):
            return
        own = internals.own_parameters(module)
        self._leaves += 1
        if own:
            self._notes.order.setdefault(id(module), self._leaves)
        if self._leaves % self._stride or len(self._calls) >= MAX_CALLS:
            return
        for value in tensors_in(args)[:1]:  # an activation that is no module shows as the input of the next one
            if value.grad_fn is not None and graph.name_of(value.grad_fn) in _KINDS:
                self._take(module, value, "input")
        if own:
            self._convolution = type(module).__name__.startswith("Conv")
        for value in tensors_in(output)[:1]:
            self._take(module, value, "output")

    def _take(self, module: torch.nn.Module, tensor: torch.Tensor, role: str) -> None:
        key, version = id(tensor), internals.version_of(tensor)
        known = self._seen.get(key)
        if known is not None and known[1] == version and known[0].is_of(tensor):
            return
        whole = ranges.real_view(tensor)
        if whole is None or whole.dim() < 2:
            return
        seen = self._seen[key] = (internals.Seen(tensor), version)
        part = _part(whole)
        dtype = torch.float64 if part.dtype == torch.float64 else torch.float32
        part = internals.unlisted(part.to(dtype, copy=True))
        kind = None if tensor.grad_fn is None else _KINDS.get(graph.name_of(tensor.grad_fn))
        time = self._times[id(module)] = self._times.get(id(module), -1) + 1
        about: dict[str, Any] = {"class_name": type(module).__name__, "role": role, "call": time, "kind": kind}
        about["leaf"] = self._leaves
        memory = tensor.untyped_storage().data_ptr()
        sequence = -1 if tensor.grad_fn is None else internals.sequence_of(tensor.grad_fn)
        self._calls.append(_Call(module, about, part, seen[0], memory, self._convolution, sequence))

    def _measure(self, call: _Call) -> dict[str, Any]:
        """Return the statistics of a call; what is a position in `numbers` may still be on a device."""
        part, kind = call.part, call.about["kind"]
        fired = part != 0 if kind == "relu" else None
        ended = None if kind is None or kind == "relu" else _saturated(part, kind)
        std, mean = _std_mean(part)
        found: dict[str, Any] = {"mean": self._keep(mean), "std": self._keep(std)}
        if self._count <= _BEGINNING and call.about["role"] == "output" and internals.own_parameters(call.module):
            unit = 1 if call.convolution else part.dim() - 1
            rows = part.movedim(unit, -1).flatten(0, -2)
            found["spread"] = self._keep(torch.linalg.vector_norm(rows - rows.mean(0)) / math.sqrt(rows.numel()))
        if fired is not None:
            unit = 1 if part.dim() > 3 or part.dim() == 2 or call.convolution else part.dim() - 1
            found["zero"] = self._keep(1 - fired.float().mean())
            found["fired"] = (part.numel() // part.shape[unit], fired.movedim(unit, 0).flatten(1).any(1))
        elif ended is not None:
            found["saturated"] = self._keep(ended.float().mean())
        return found

    def _keep(self, number: torch.Tensor) -> _Number:
        self._numbers.append(number)
        return _Number(len(self._numbers) - 1)

    def end(self, root: torch.nn.Module, prefix: str, output: Any, names: Mapping[int, str] | None = None) -> None:
        """Record the statistics under the modules' paths; `names` are those in `root`, by the modules' numbers."""
        if not self._calls:
            return
        if names is None:
            names = {id(module): name for name, module in internals.named_modules(root)}
        called = {id(call.module) for call in self._calls}
        paths = {key: prefix + (names[key] or "(model)") for key in called if key in names}
        given = {t.untyped_storage().data_ptr() for t in tensors_in(output) if ranges.has_numbers(t)}
        last = max(self._notes.order.values(), default=0)
        for call in self._calls:
            module, about = call.module, call.about
            path = paths.get(id(module), type(module).__name__)
            path += f" (call {about['call']})" if about["call"] and about["role"] == "output" else ""
            path += " (input)" if about["role"] == "input" else ""
            before = about["leaf"] + (about["role"] == "output") <= last
            with torch.no_grad():
                seen = self._measure(call)
                fired = seen.pop("fired", None)
                units = self._fired(path, *fired) if fired is not None else {}
            hidden = before and (not call.result.is_alive() or call.memory not in given)
            self._notes.calls.append({"path": path, **about, **seen, **units, "hidden": hidden})
        self._take_weights(paths, tensors_in(output))
        self._notes.numbers = device.numbers(self._numbers)
        self.forget()

    def _take_weights(self, paths: Mapping[int, str], outputs: Sequence[torch.Tensor]) -> None:
        """Take what a softmax in the code of a module, between its calls, makes to weigh something with."""
        known = {call.sequence for call in self._calls if call.about["kind"] == "softmax"}
        calls = sorted((call.sequence, paths.get(id(call.module), "")) for call in self._calls if call.sequence >= 0)
        names: dict[str, int] = {}
        for node in sorted(_weighing_softmaxes(outputs), key=internals.sequence_of):
            sequence, result = internals.sequence_of(node), graph.saved_tensor(node, "result")
            whole = None if result is None else ranges.real_view(result)
            if whole is None or whole.dim() < 2 or sequence in known or len(self._notes.calls) >= 2 * MAX_CALLS:
                continue
            before = [path for at, path in calls if at < sequence][-1:]
            after = [path for at, path in calls if at > sequence][:1]
            place = _around(*before, *after) or "".join(before) or "(model)"
            names[place] = names.get(place, -1) + 1
            path = f"{place} (softmax{f' {names[place]}' if names[place] else ''})"
            with torch.no_grad():
                dim = int(graph.saved_number(node, "dim") or 0)
                ended, masked = _saturated(_part(whole.movedim(dim, -1)), "softmax").float(), _masked(node)
                share = ended.mean()
                if masked is not None and _fits(masked, whole):  # a row of one entry has all the weight there
                    open_ = _part((~masked).expand_as(whole).movedim(dim, -1)).sum(-1) > 1
                    share = (ended * open_).sum() / open_.sum().clamp(min=1)
                about = {"class_name": "softmax", "role": "weights", "kind": "softmax"}
                found = {"saturated": self._keep(share), "hidden": True}
            self._notes.calls.append({"path": path, **about, **found})

    def _fired(self, path: str, inputs: int, fired: torch.Tensor) -> dict[str, Any]:
        """Return the share of units that no input of the last samples made fire, and how many inputs that were."""
        if path not in self._alive and len(self._alive) >= _MAX_SITES:
            return {}
        past = self._alive.setdefault(path, deque(maxlen=_SAMPLES))
        if past and past[-1][1].shape != fired.shape:
            past.clear()
        past.append((inputs, internals.unlisted(fired)))
        any_time = torch.stack([own for _, own in past]).any(0)
        dead = self._keep(1 - any_time.float().mean())
        return {"zero_units": dead, "inputs": sum(n for n, _ in past), "units": fired.numel()}

    def forget(self) -> None:
        """Discard the samples of a forward that is over, or that raised."""
        self._calls, self._numbers = [], []
        self._seen.clear()
        self._times.clear()

    # --- optimizer ----------------------------------------------------------------------------------------------------

    def before(self, watch: OptimizerWatch, record: StepRecord) -> None:
        """Copy a block of each parameter just before the optimizer changes it, in a sampled step."""
        self._blocks = []
        if not self.sampling or not record.checked or record.flags & (Flag.CLOSURE | Flag.SKIPPED):
            return
        notes, self._notes = self._notes, LayerSamples(order=self._notes.order)
        if self._only is not None:  # of many layers the order is that of their registration
            notes.order = {}
        # an optimizer inside backward has moved its parameters already
        if watch.members or (dist.is_initialized() and dist.get_rank() != 0):
            record.parts[LayerSamples] = notes
            return
        first = watch.index not in self._begun
        self._begun.add(watch.index)
        rates = {id(p): group.get("lr") for group in watch.groups() for p in group["params"]}
        for name, parameter in self._chosen(watch, notes):
            block = _block(parameter)
            if block is None:
                continue
            rate = rates.get(id(parameter))
            fact: dict[str, Any] = {"numel": parameter.numel(), "block": block.numel(), "dim": parameter.dim()}
            fact["lr"] = float(rate) if isinstance(rate, int | float) else None
            fact["given"] = parameter.grad is not None  # what was taken away moves nothing
            notes.names.append(name)
            notes.facts.append(fact)
            self._blocks.append(block)
        self._symmetry = [internals.unlisted(_symmetric(p)) for p in self._parameters(watch, notes)] if first else []
        self._blocks = internals.clones(self._blocks)
        record.parts[LayerSamples] = notes

    def after(self, watch: OptimizerWatch, notes: LayerSamples | None) -> None:
        """Measure how far the optimizer has moved the parameters."""
        blocks, self._blocks = self._blocks, []
        if notes is None or not blocks:
            return
        with torch.no_grad():
            pairs = [
                (block, new)
                for parameter, block in zip(self._parameters(watch, notes), blocks, strict=True)
                if (new := _block(parameter)) is not None
            ]
            norms, changes = internals.distances([old.float() for old, _ in pairs], [now.float() for _, now in pairs])
        notes.norms = device.numbers([*norms, *changes, *self._symmetry])

    def _chosen(self, watch: OptimizerWatch, notes: LayerSamples) -> list[tuple[str, torch.Tensor]]:
        """Return the parameters to describe, from the first layer that is called to the last."""
        known = self._described
        if not notes.order and known is not None and known[:2] == (watch.index, watch.key):
            table = dict(zip(watch.names, watch.params, strict=True))
            return [(name, table[name]) for name in known[2]]
        rows = self._rows(watch, notes)
        if not notes.order:
            self._described = watch.index, watch.key, [name for name, _ in rows]
        return rows

    @staticmethod
    def _rows(watch: OptimizerWatch, notes: LayerSamples) -> list[tuple[str, torch.Tensor]]:
        place: dict[int, tuple[int, int]] = {}
        for wrapper in watch.wrappers:
            module = wrapper.module()
            for part in () if module is None else internals.modules(module):
                for parameter in internals.own_parameters(part):
                    place.setdefault(id(parameter), (notes.order.get(id(part), 1 << 30), len(place)))
        rows = [(n, p) for n, p in zip(watch.names, watch.params, strict=True) if p.requires_grad]
        rows = [(n, p) for n, p in rows if not internals.is_distributed(p)]  # a part says nothing of its layer
        rows.sort(key=lambda row: place.get(id(row[1]), (1 << 30, 1 << 30)))
        if len(rows) <= MAX_PARAMETERS:
            return rows
        weights = [row for row in rows if row[1].dim() > 1] or rows
        return weights[:: math.ceil(len(weights) / MAX_PARAMETERS)]

    @staticmethod
    def _parameters(watch: OptimizerWatch, notes: LayerSamples) -> list[torch.Tensor]:
        table = dict(zip(watch.names, watch.params, strict=True))
        return [table[name] for name in notes.names]


def _weighing_softmaxes(outputs: Sequence[torch.Tensor]) -> list[Any]:
    """Return the nodes of softmaxes in a forward's graph whose results are multiplied with something.

    One over what was divided by a number below 1 is left out: it has a low temperature, on purpose.
    """
    waiting = deque((tensor.grad_fn, "") for tensor in outputs if tensor.grad_fn is not None)
    seen: set[Any] = set()
    found: list[Any] = []
    for _ in range(_MAX_NODES):
        if not waiting:
            break
        node, user = waiting.popleft()
        name = graph.name_of(node)
        if name == "SoftmaxBackward0" and user in _WEIGHING and node not in found and not _is_sharpened(node):
            found.append(node)
        if node in seen:
            continue
        seen.add(node)
        form = name in FORM or name == "ExpandBackward0"
        waiting.extend((below, user if form else name) for below, _ in node.next_functions if below is not None)
    return found


def _before_softmax(node: Any) -> Iterator[Any]:
    """Yield the nodes that scale and mask the scores of a softmax, the last one first."""
    for _ in range(_MAX_BEFORE):
        below = [inner for inner, _ in node.next_functions if inner is not None]
        if len(below) != 1 or not (graph.name_of(below[0]) in FORM or graph.name_of(below[0]) in _ON_SCORES):
            return
        node = below[0]
        yield node


def _is_sharpened(node: Any) -> bool:
    return any(
        [graph.name_of(below) == "DivBackward0" and 0 < (scaled_by(below) or 1) < 1 for below in _before_softmax(node)]
    )


def _masked(node: Any) -> torch.Tensor | None:
    """Return what masks the scores of a softmax, if that is known."""
    for below in [*_before_softmax(node)]:
        if graph.name_of(below) == "MaskedFillBackward0":
            return graph.saved_tensor(below, "mask")
        if graph.name_of(below) == "WhereBackward0" and (kept := graph.saved_tensor(below, "condition")) is not None:
            return ~kept if below.next_functions[0][0] is not None else kept
    return None


def _fits(mask: torch.Tensor, whole: torch.Tensor) -> bool:
    """Return whether a mask can be laid over a tensor."""
    sizes = zip(reversed(mask.shape), reversed(whole.shape), strict=False)
    return mask.dtype is torch.bool and mask.dim() <= whole.dim() and all([own in {1, size} for own, size in sizes])


def _around(*paths: str) -> str:
    """Return the innermost module that all of the modules at some paths are in."""
    parts = [path.split(".")[:-1] for path in paths]
    same = itertools.takewhile(lambda names: len(set(names)) == 1, zip(*parts, strict=False))
    return ".".join(names[0] for names in same)


def _part(tensor: torch.Tensor) -> torch.Tensor:
    """Return a part of a tensor that is small enough, along everything but its units."""
    for dim in (0, *range(tensor.dim() - 1, 1, -1)) if tensor.dim() > 3 else (0, 1)[: tensor.dim() - 1]:
        if tensor.numel() > MAX_ELEMENTS:
            length = max(1, tensor.shape[dim] * MAX_ELEMENTS // tensor.numel())
            tensor = tensor.narrow(dim, 0, length)
    return tensor


def _std_mean(part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return deviation and mean of a copy, which may be written.

    On the CPU torch's own `std_mean` takes four times as long as this. Measured from one of the elements, the deviation
    of equal elements is exactly 0.
    """
    if part.device.type != "cpu":
        std, mean = torch.std_mean(part, correction=0)
        return std, mean
    origin = part[(0,) * part.dim()].clone()
    moved = part.sub_(origin)
    mean = moved.mean()
    return torch.linalg.vector_norm(moved.sub_(mean)) / math.sqrt(part.numel()), mean + origin


def _saturated(part: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "softmax":
        return part.amax(-1) > 1 - _END if part.shape[-1] > 1 else part.new_zeros(1)
    low = -1.0 if kind == "tanh" else 0.0
    return (part > 1 - _END) | (part < low + _END)


def _block(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return a view of a parameter's first elements; None where that would copy it whole."""
    own = ranges.real_view(parameter)
    if own is None or not own.is_contiguous():
        return None
    return own.view(-1)[:MAX_ELEMENTS]


def _symmetric(parameter: torch.Tensor) -> torch.Tensor:
    """Return whether the rows of a weight are all the same and not zero."""
    if parameter.dim() < 2 or parameter.shape[0] < _MIN_ROWS:
        return torch.zeros((), device=parameter.device)
    with torch.no_grad():
        rows = parameter[:_MAX_ROWS].detach().flatten(1)[:, :_MAX_COLUMNS]
        return ((rows == rows[:1]).all() & (rows != 0).any()).float()
