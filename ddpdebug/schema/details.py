"""Details of one step that ranks send to each other on request, by kind. Torch-free.

A rank builds the answer from what it kept of its recent steps (`monitor/details.py`); it travels as JSON in the
exchange's variable part and lies in `observations.jsonl`. `DETAILS` has the classes by kind; `wire.py` says how they
are written and read. Digests are 16 hex digits, so that JSON does not round them. Names are those of parameters,
buffers or modules as the model has them; with several DDPs on one optimizer `ddp1.` stands before them. A location is
the user's `file:line`, None where it is not known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from ddpdebug.schema.announcements import Gathered
from ddpdebug.schema.wire import ABSENT, Struct, absent, called, from_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Detail(Struct):
    """One rank's answer about one step."""

    kind: ClassVar[str]

    def __init_subclass__(cls, kind: str = "") -> None:
        """Set the kind beside the base; `slots` makes a second class of each, which has it already."""
        if kind:
            cls.kind = kind


D = TypeVar("D", bound=Detail)


# --- parameters, gradients, state -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Load(Struct):
    """A `load_state_dict` since the previous step."""

    what: str  # class of the module or optimizer that was loaded
    location: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters(Detail, kind="parameters"):
    """Digests of the parameters around a step, by name."""

    before: Mapping[str, str] = field(default_factory=dict)  # as this step found them
    after: Mapping[str, str] = field(default_factory=dict)  # as it left them, of those that a DDP owns
    previous: Mapping[str, str] = field(default_factory=dict)  # as this rank's last step left them
    foreign: Mapping[str, str] = field(default_factory=dict)  # as this step left them, of those that no DDP owns
    frozen: Mapping[str, str] = field(default_factory=dict)  # of a DDP's that no optimizer steps; now and then
    order: tuple[str, ...] = ()  # all names of the optimizer's, as the model has them
    norms: Mapping[str, float] = field(default_factory=dict)  # after the step; only with a tolerance
    loads: tuple[Load, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients(Detail, kind="gradients"):
    """Digests, sums and norms of the gradients of a step, by name."""

    digests: Mapping[str, str] = field(default_factory=dict)  # as the optimizer finds them, of those that a DDP owns
    foreign: Mapping[str, str] = field(default_factory=dict)  # likewise, of those that no DDP owns
    missing: tuple[str, ...] = ()  # trainable parameters without a gradient
    local_sums: Mapping[str, float] = field(default_factory=dict)  # linear checksums before the reduction
    local_norms: Mapping[str, float] = field(default_factory=dict)
    reduced_sums: Mapping[str, float] = field(default_factory=dict)  # the same after it
    reduced_norms: Mapping[str, float] = field(default_factory=dict)
    step_norms: Mapping[str, float] = field(default_factory=dict)  # as the optimizer finds them
    # where FSDP2 reduces: sums of what this rank put in, divided, by the piece that they go to, after their norm
    put_in: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    got: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # the piece it got, -1 for unknown, and its sum
    gathered: Mapping[str, str] = field(default_factory=dict)  # what FSDP2 has gathered the parameter as
    kept: tuple[str, ...] = ()  # parameters that stayed gathered as they are not any more
    waiting: tuple[str, ...] = ()  # parameters of which FSDP2 had gradients at the step that it had not reduced


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperParameters(Detail, kind="hyper"):
    """The settings of an optimizer, one table per parameter group.

    Plain values by their name in the group (`lr`, `betas`, ...) and, under `params`, which parameters it has:
    "4 parameters, <digest>".
    """

    bare: ClassVar[bool] = True

    groups: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerState(Detail, kind="state"):
    """The optimizer's state after a step: parameter -> key -> digest.

    With a tolerance the parameter "" has {"parameter:key": norm} of the tensors in it.
    """

    bare: ClassVar[bool] = True

    states: Mapping[str, Mapping[str, str | float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferDigests(Detail, kind="buffers"):
    """Digests of the buffers, after DDP has broadcast them."""

    digests: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Modes(Detail, kind="modes"):
    """The mode of each module in the step's forwards: true is train, false is eval."""

    bare: ClassVar[bool] = True

    training: Mapping[str, bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica(Struct):
    """A module outside DDP that is a copy of a model: an EMA, a teacher."""

    digest: str  # of all its tensors
    tensors: Mapping[str, str] = field(default_factory=dict)  # digests of parameters and buffers
    changed: bool = False  # it is not what it was when it was first seen
    used: bool = False  # its forward has run, or the user has named it


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas(Detail, kind="replicas"):
    """The copies of modules that a rank has, by name."""

    bare: ClassVar[bool] = True

    copies: Mapping[str, Replica]


# --- the DDP contract -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Bypass(Struct):
    """A backward without a forward of the DDP wrapper: the inner module was called directly."""

    location: str | None = None  # of that call, once it was made again; before, of the backward


@dataclass(frozen=True, slots=True, kw_only=True)
class UnsyncedBackward(Struct):
    """A backward before the step that DDP did not reduce."""

    kind: str  # "last-micro-batch", "forward-only" or "flag-after-forward": which part stood under `no_sync()`
    location: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip(Struct):
    """A clipping of gradients."""

    norm: float  # of the gradients before; NaN where it would have been waited for
    max: float
    before_sync: bool = False  # it saw this rank's own gradients
    location: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract(Detail, kind="contract"):
    """The requirements of DDP, and this rank's use of DDP around a step."""

    bypass: Bypass | None = None
    no_sync: UnsyncedBackward | None = None
    ddp: int = 0  # number of DDP wrappers
    world: int = 0
    groups: tuple[tuple[int, ...], ...] = ()  # ranks over which each wrapper reduces
    hook: str | None = None  # the communication hook, as `module.function`
    ignored: tuple[str, ...] = ()  # parameters on DDP's ignore list
    location: str | None = None  # of the optimizer step
    #: Why the reducer does not own a parameter: "unfrozen", "added", "replaced", "retyped" or "never-wrapped".
    unreduced: Mapping[str, str] = field(default_factory=dict)
    gathered: tuple[Gathered, ...] = ()
    clips: tuple[Clip, ...] = ()
    find_unused: bool = False  # some wrapper looks for unused parameters
    parameters: str = ""  # a digest of the names and shapes of the optimizer's, where no DDP owns any of them
    #: Parameters that no DDP owns and that are marked as a rank's own part, as Megatron-LM does (`allreduce=False`).
    marked: tuple[str, ...] = ()
    messages: bool = False  # the rank has sent to one other rank in this step, or received from one: a pipeline's stage


# --- numbers that are not finite --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class NonfiniteLoss(Struct):
    """A loss that is NaN or infinite."""

    value: str | float  # the loss itself or, with `operands`, the result of the operation: "nan" or "inf"
    micro_batch: int = 0
    backward: str | None = None  # location of the backward
    expression: str | None = None  # location of the assignment that made the loss
    operation: str | None = (
        None  # the autograd node of the loss or, with `operands`, of what made it so: "LogBackward0"
    )
    operands: tuple[Mapping[str, Any], ...] | None = field(
        default=None, metadata=ABSENT
    )  # ranges, where the result could be computed once more
    brought: bool | None = field(default=None, metadata=ABSENT)  # an operand has no gradient and was bad already
    location: str | None = field(default=None, metadata=absent("line_found", "candidates"))  # of the operation
    line_found: str | None = field(default=None, metadata=ABSENT)  # how the location was found
    candidates: tuple[str, ...] | None = field(
        default=None, metadata=ABSENT
    )  # locations, where it may be one of several


@dataclass(frozen=True, slots=True, kw_only=True)
class LossBackward(Struct):
    """The operation of a finite loss whose backward makes its gradient non-finite."""

    operation: str  # the autograd node
    value: str  # of the gradient: "nan" or "inf"
    operands: tuple[Mapping[str, Any], ...] | None = field(default=None, metadata=ABSENT)
    location: str | None = field(default=None, metadata=absent("line_found", "candidates"))
    line_found: str | None = field(default=None, metadata=ABSENT)
    candidates: tuple[str, ...] | None = field(default=None, metadata=ABSENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCall(Struct):
    """A module call with an output that is not finite."""

    module: str  # path
    caller: str | None = None  # path of the module whose code made the call
    class_name: str = field(metadata=called("class"))
    call: int = 0  # of this module in this forward
    micro_batch: int = 0
    order: int = 0  # of the call in this forward
    output: int = 0  # which of the call's outputs
    usual: bool = False  # so in healthy steps as well
    kinds: tuple[str, ...] = ()  # of "NaN", "+Inf", "-Inf"
    count: int | None = None  # of non-finite elements; None on a device
    range: tuple[float, float] | None = None  # of the finite ones
    dtype: str
    shape: tuple[int, ...] = ()
    input_range: tuple[float, float] | None = None
    input_nonfinite: bool | None = None  # None: the inputs could not be looked at


@dataclass(frozen=True, slots=True, kw_only=True)
class BadInput(Struct):
    """An argument of the model's forward that is not finite."""

    argument: str  # "x", "batch['x']" or "args[0]"
    dtype: str
    shape: tuple[int, ...] = ()
    kinds: tuple[str, ...] = ()  # of "NaN", "+Inf", "-Inf"
    count: int | None = None  # of non-finite elements; None on a device
    samples: tuple[int, ...] = ()  # the first that hold some, along dimension 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryGradient(Struct):
    """The gradient that enters the model from the loss."""

    finite: bool
    range: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class NonfiniteParameters(Struct):
    """Parameters and optimizer state that are not finite."""

    before: tuple[str, ...] = ()  # as the step found them
    after: tuple[str, ...] = ()  # as it left them, although the gradients were finite
    state: tuple[tuple[str, str], ...] = ()  # likewise: (parameter, key)
    phase: str | None = None  # "optimizer" or "outside-optimizer": who made them so; None: not known
    unwatched_since: int | None = None  # the first of the steps that nobody has watched, where the end showed `before`


@dataclass(frozen=True, slots=True, kw_only=True)
class NearLimit(Struct):
    """A 16-bit number near the largest one of its dtype."""

    module: str  # path, or "gradient of <parameter>"
    dtype: str
    largest: float
    limit: float
    history: tuple[tuple[int, float], ...] = ()  # (step, largest) of the steps before


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics(Detail, kind="numerics"):
    """The non-finite numbers seen in a step."""

    may_be_empty: ClassVar[bool] = True

    checked: bool = False  # module outputs were looked at
    compiled: bool = False  # they were not, because of torch.compile
    loss: NonfiniteLoss | None = None
    loss_line: str | None = None  # location of a finite loss whose gradient is not finite
    loss_backward: LossBackward | None = None
    forward: tuple[ModuleCall, ...] = ()
    model: str | None = None  # the class of the model whose forward ran last
    called_at: str | None = None  # location of the call of that forward
    output_finite: bool | None = None  # of the model; None: it was not looked at
    inputs: tuple[BadInput, ...] = ()
    entry: EntryGradient | None = None
    local: tuple[str, ...] = ()  # own gradients that were non-finite, in the order in which backward made them
    reduced: tuple[str, ...] = ()  # gradients that were non-finite at the step
    largest: Mapping[str, float] = field(default_factory=dict)  # of own gradients, where a hook or 16 bits reduce them
    parameters: NonfiniteParameters | None = None  # always there where anything was seen
    near: tuple[NearLimit, ...] = ()
    replay: Mapping[str, Any] | None = None  # what the replay of the step has found, see forensics/replay/investigator


# --- memory, layers, the training loop --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder(Struct):
    """A variable that keeps tensors, or the autograd graphs of steps, alive."""

    name: str  # "losses", "self.history", "metrics['loss']"
    kind: str  # "list", "dict", "Tensor", ...
    entries: int | None = None  # of a container
    function: str | None = None  # in which the variable lives; None for a global
    location: str | None = None  # that fills it, or where the code that has it runs
    graphs: int = 0  # steps, or passes through the model, whose graphs it keeps
    tensors: int = 0
    bytes: int = 0  # of the tensors themselves, without what their graphs keep


@dataclass(frozen=True, slots=True, kw_only=True)
class Holders(Detail, kind="holders"):
    """The holders of tensors or graphs, of the one rank that searched (forensics/memory/holders.py)."""

    holders: tuple[Holder, ...] = ()  # those that keep most, first
    visits: int = 0  # objects that the search has looked at


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerActivation(Struct):
    """Statistics of one module's output, or of its input if that is a functional activation.

    Of the weights that a softmax makes in a module's own code nothing is told but the share at the end of their range.
    """

    class_name: str = field(metadata=called("class"))
    role: str = "output"  # or "input", or "weights"
    call: int = 0  # of this module in the forward
    kind: str | None = None  # of the activation: "relu", "sigmoid", "tanh" or "softmax"
    leaf: int = 0  # place in the forward
    mean: float | None = None
    std: float | None = None
    #: Deviation between inputs, of each unit by itself: what a bias adds is none. Of layers with weights, at first.
    spread: float | None = field(default=None, metadata=ABSENT)
    zero: float | None = field(default=None, metadata=ABSENT)  # share of zeros, of a relu
    saturated: float | None = field(default=None, metadata=ABSENT)  # share at the end of the range, of the others
    zero_units: float | None = field(
        default=None, metadata=ABSENT
    )  # share of units that were 0 for all inputs of the last samples
    inputs: int | None = field(default=None, metadata=ABSENT)  # how many those were
    units: int | None = field(default=None, metadata=ABSENT)  # how many there are
    hidden: bool = False  # other weights follow


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParameter(Struct):
    """Statistics of one parameter around the step; of rank 0 only."""

    norm: float | None = None
    grad_norm: float | None = None
    update: float | None = None  # norm of the change
    digest: str | None = None  # before the step
    numel: int = 0
    dim: int = 0
    lr: float | None = None
    symmetric: bool | None = field(default=None, metadata=ABSENT)  # all its rows are equal; first sample only


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerStatistics(Detail, kind="layers"):
    """Statistics of a sampled step, for a bounded number of modules and parameters; empty in other steps."""

    may_be_empty: ClassVar[bool] = True

    modules: Mapping[str, LayerActivation] = field(default_factory=dict)  # by path, " (call 1)" or " (input)" behind it
    parameters: Mapping[str, LayerParameter] = field(default_factory=dict)
    order: tuple[str, ...] | None = None  # the parameters from the first layer to the last; None: not sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalForwards(Struct):
    """Training forwards in which modules were in eval mode."""

    modules: tuple[str, ...] = ()
    part: str | None = field(default=None, metadata=ABSENT)  # that they are in, where the model is in train mode
    location: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CarriedGradients(Struct):
    """A step with foreign gradients: of the step before, of another loss, of one loss counted twice, ..."""

    location: str | None = None
    #: "loss" or "twice"; "attack": of a loss that was to change the input; "again": of a forward that was computed
    #: again with other random numbers. None: of the step before.
    kind: str | None = field(default=None, metadata=ABSENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscardedGradients(Struct):
    """Gradients that were cleared before the step."""

    kind: str  # "all", "micro-batches" or "end of epoch": these, as another epoch has begun
    count: int = 0
    location: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SteppedTwice(Struct):
    """Parameters that another optimizer has stepped since the last backward."""

    other: str  # class of that optimizer
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulation(Struct):
    """The micro-batches of a step whose mean losses do not add up to one mean."""

    micro_batches: int
    location: str | None = None
    loss: str | None = None  # the loss function, as in the graph: "MseLoss"
    divided_by: float | None = field(default=None, metadata=ABSENT)  # all numbers together; None: by none
    ranks: int | None = field(default=None, metadata=ABSENT)  # over which gradients are averaged
    reduced_by: float | None = field(default=None, metadata=ABSENT)  # what their sum over ranks is divided by
    classes: bool | None = field(default=None, metadata=ABSENT)  # the loss is a cross entropy
    counts: tuple[float, ...] | None = field(default=None, metadata=ABSENT)  # least, most elements of one


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledOften(Struct):
    """A scheduler that was called several times for one step."""

    class_name: str = field(metadata=called("class"))
    calls: int = 0
    micro_batches: int = 0
    location: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledElsewhere(Struct):
    """A learning rate that was set where no optimizer reads it."""

    #: "scheduler" (of another optimizer), "attribute" (`optimizer.lr = x`), "group" (of some groups only),
    #: "overwritten" (by the schedule's first step), "factor" (a rate that is taken for one)
    kind: str
    class_name: str = field(metadata=called("class"))
    location: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledClip(Struct):
    """Gradients that still carried the loss scale when clipped or used; or a clipping without effect."""

    location: str | None = None
    scale: float | None = None  # None where it is on a device
    idle: bool | None = field(default=None, metadata=ABSENT)  # between a step and the next backward
    #: "nothing": of what has no gradients; "layers": of a part of each layer; "early": after each micro-batch. No
    #: clipping are "step", "part", "never": some losses, or all in float16, have no scale.
    instead: str | None = field(default=None, metadata=ABSENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe(Detail, kind="recipe"):
    """The training loop's actions around a step, with an entry for each flag that asks for one."""

    modes: EvalForwards | None = field(default=None, metadata=ABSENT)
    carried: CarriedGradients | None = field(default=None, metadata=ABSENT)
    discarded: DiscardedGradients | None = field(default=None, metadata=ABSENT)
    accumulation: Accumulation | None = field(default=None, metadata=ABSENT)
    twice: SteppedTwice | None = field(default=None, metadata=ABSENT)
    label: int | None = field(default=None, metadata=ABSENT)  # the only class among the labels of this step
    labels: int | None = field(default=None, metadata=ABSENT)  # how many there were
    scheduler: ScheduledOften | None = field(default=None, metadata=ABSENT)
    elsewhere: ScheduledElsewhere | None = field(default=None, metadata=ABSENT)
    clip: ScaledClip | None = field(default=None, metadata=ABSENT)
    lr: tuple[float | str | None, ...] = ()  # of the parameter groups


#: Everything a rank can be asked for about a past step.
DETAILS: Mapping[str, type[Detail]] = {
    kind.kind: kind
    for kind in (
        Parameters,
        Gradients,
        Contract,
        HyperParameters,
        OptimizerState,
        BufferDigests,
        Modes,
        Replicas,
        Numerics,
        LayerStatistics,
        Holders,
        Recipe,
    )
}
KINDS = tuple(DETAILS)


def read_detail(kind: str, value: Any) -> Detail | None:
    """Return the detail from a JSON value; None if it is malformed, empty or of an unknown kind."""
    return from_json(DETAILS[kind], value) if kind in DETAILS else None


def hex_digest(value: int) -> str:
    """Return a digest in hexadecimal, as details contain it."""
    return f"{value:016x}"


def part_name(name: str, part: str) -> str:
    """Return the name of a part of a parameter whose other parts are on other ranks."""
    return f"{name} [{part}]"


def whole_name(name: str) -> str:
    """Return the name of the whole parameter from that of a part."""
    return name.partition(" [")[0]


def is_part(name: str) -> bool:
    """Whether a name is that of a part of a parameter, held by some ranks only."""
    return whole_name(name) != name


def differing_names(by_rank: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Return the names whose values are not equal on all ranks, in order of first appearance.

    Absent counts as a value; of a part of a parameter it means that other ranks hold it.
    """
    order: dict[str, None] = {}
    for table in by_rank.values():
        order.update(dict.fromkeys(table))
    missing = object()
    result = []
    for name in order:
        values = [table.get(name, missing) for table in by_rank.values()]
        if is_part(name):
            values = [value for value in values if value is not missing]
        if any(value != values[0] for value in values[1:]):
            result.append(name)
    return result
