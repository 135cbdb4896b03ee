"""Announcements: facts that ranks send to each other unasked, once each, by topic. Torch-free.

A rank announces what it has learned; the rules compare it. On the wire and in `observations.jsonl` an announcement is a
topic and a JSON value; `:<k>` behind the topic says which of several things of one kind it is about (the k-th DDP, the
k-th DataLoader). `TOPICS` has the classes by topic, several where a topic has several kinds; `wire.py` says how they
are written and read. Digests are 16 hex digits. A location is the user's `file:line`, None where it is not known.
`step` counts optimizer steps from 0: the one in which the rank was when it spoke.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, Literal, Protocol

from ddpdebug.schema.wire import Struct, called, from_json


class Scope(Enum):
    """The ranks whose announcements of a topic are judged together."""

    ALL_RANKS = "those of all ranks, once all have spoken: the n-th of each with each other"
    SHARED = "those of the ranks that have spoken within a step of each other"
    ALONE = "each by itself and at once, because the other ranks may never speak"


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement(Struct):
    """A fact that one rank sends to the others: its loader, its loss, the reason of its end.

    Attributes:
        topic: the name on the wire and in files, without number.
        scope: with whose announcements it is compared.
    """

    topic: ClassVar[str]
    scope: ClassVar[Scope] = Scope.ALL_RANKS

    def __init_subclass__(cls, topic: str = "", scope: Scope | None = None) -> None:
        """Set what a class says beside its base; `slots` makes a second class of each, which has it already."""
        if topic:
            cls.topic = topic
        if scope is not None:
            cls.scope = scope


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFact(Announcement):
    """A fact that a rank learned in some step."""

    step: int | None = None


class Announce(Protocol):
    """Sends an announcement to all ranks; `number` is that of its subject: a DDP, a loader, ..."""

    def __call__(self, announcement: Announcement, number: int | None = None) -> None:
        """Announce it."""


def topic_text(announcement: Announcement, number: int | None = None) -> str:
    """Return the topic of an announcement as it is sent, with its number."""
    return announcement.topic if number is None else f"{announcement.topic}:{number}"


# --- how the ranks are made -------------------------------------------------------------------------------------------

#: "parameter" or "buffer", name, shape, dtype, whether it is trained.
StructureEntry = tuple[str, str, tuple[int, ...], str, bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure(Announcement, topic="structure"):
    """Parameters and buffers of the k-th DDP, before it was wrapped."""

    digest: str = ""  # of the entries
    entries: tuple[StructureEntry, ...] = ()
    group: tuple[int, ...] = ()  # ranks of the process group that it was given


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialValues(Announcement, topic="init"):
    """Digests of the k-th DDP's parameters and buffers, before DDP broadcast those of rank 0."""

    digests: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class WrapperGroup(Announcement, topic="group"):
    """The ranks over which the k-th DDP reduces gradients."""

    ranks: tuple[int, ...]
    beside: tuple[tuple[int, ...], ...] = ()  # other groups of the script that the rank is in, smaller than the world


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshPlace(Announcement, topic="mesh"):
    """The place of a rank on the meshes of the k-th optimizer's DTensors, and the ranks that share its parts.

    Args:
        places: dimension of a mesh -> this rank's coordinate on it, and its size.
        classes: what is compared, in words of where it lies -> how many parameters. Its ranks are those that say the
            same words.
        alone: parameters of which no other rank holds the same part.
        averages: ranks over which FSDP2 averages gradients, this one among them; each should be fed other batches.
        beside: other groups of the script that the rank is in, smaller than the world.
        model: digest of the parameters' names, whole shapes, dtypes and placements.
        staged: the job may be a pipeline, whose stages one model is made of.
        drawn: part of a matrix ("head.weight [dp 0 of 2]") -> mark of its rows at the first step; the largest ones.
    """

    places: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    classes: Mapping[str, int] = field(default_factory=dict)
    alone: int = 0
    averages: tuple[int, ...] = ()
    beside: tuple[tuple[int, ...], ...] = ()
    model: str = ""
    staged: bool = False
    drawn: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped(StepFact, topic="dropped", scope=Scope.ALONE):
    """The k-th optimizer, of parameters without a DDP, is gone with them, while one that has a DDP is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision(StepFact, topic="precision"):
    """The precision of the k-th DDP's first training forward."""

    location: str | None = None  # that calls the model
    autocast: str | None = None  # dtype
    matmul: str | None = None  # torch's setting for float32 products, on CUDA


#: Before the value of a constant that is a number.
NUMBER = "number:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants(StepFact, topic="constants"):
    """Floating-point tensors and numbers in plain attributes of the k-th DDP's modules.

    As they were when it was wrapped; of those that its first training forwards left as they were.
    """

    tensors: Mapping[str, str] = field(default_factory=dict)  # attribute path -> "(shape):digest", or "number:0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberChange(Struct):
    """A change, outside of the forward, of a plain number in a module."""

    was: float
    value: float  # now
    step: int  # of its first change
    times: int  # that it was found changed


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers(StepFact, topic="numbers"):
    """Numbers in plain attributes of the k-th DDP's modules that have changed since they were announced last."""

    changes: Mapping[str, NumberChange] = field(default_factory=dict)  # by attribute path


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexList(Struct):
    """The indices of a `Subset`."""

    digest: str
    length: int
    members: str | None = None  # digest whatever their order
    sketch: tuple[int, ...] = ()  # the smallest hashes of the indices, sorted: the same of them where they overlap
    location: str | None = None  # that made it
    drawn: str | None = None  # by `random_split`: from the "default" generator or from one of the script's "own"
    seed: int | None = None  # of that generator


@dataclass(frozen=True, slots=True, kw_only=True)
class Content(Struct):
    """The records in an attribute of a data set."""

    length: int
    unordered: str  # digest of the rows whatever their order
    columns: Mapping[str, str] = field(default_factory=dict)  # place in a record, or key -> digest; of several


@dataclass(frozen=True, slots=True, kw_only=True)
class Loader(Announcement, topic="loader"):
    """The k-th DataLoader and its sampler, at the start of each epoch over it."""

    sampler: str = ""  # class
    distributed: bool = False  # it has the attributes of a DistributedSampler; only then the rest of a sampler is known
    length: int | None = None  # of the data set
    batch_size: int | None = None
    batches: int | None = None
    indices: IndexList | None = None
    workers: int = 0
    prefetch: int | None = None  # batches ahead for each worker
    persistent: bool | None = None  # workers outlive an epoch
    pinned: bool | None = None  # batches lie in pinned memory
    dataset: str | None = None  # the user's class and where its items are made: "Pairs at data.py:12"
    replicas: int | float | str | None = None
    rank: int | float | str | None = None
    seed: int | float | str | None = None
    epoch: int | float | str | None = None
    shuffle: bool | int | None = None
    drop_last: bool | int | None = None
    iterations: int = 0  # epochs begun, this one too
    attributes: Mapping[str, str] = field(default_factory=dict)  # attribute path -> digest of the data set's plain data
    content: Mapping[str, Content] = field(default_factory=dict)  # of the attributes that hold records
    location: str | None = None  # that iterates over it
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitedLoader(Announcement, topic="awaited"):
    """The DataLoader for which training has recently waited longest, once that is clearly another one."""

    loader: int
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamEnded(Announcement, topic="alone:stream", scope=Scope.ALONE):
    """The k-th DataLoader has reached the end of an IterableDataset of unknown length."""

    loader: int
    iterations: int = 0  # epochs begun, this one too
    batches: int = 0  # in this epoch
    began: int = 0  # the step at which it was begun
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedOrder(StepFact, topic="alone:order", scope=Scope.SHARED):
    """A user's sampler drew the same indices in two training passes, in an order other than the natural one.

    Told of samplers of the user's own, once: what torch's does is in `Loader`.
    """

    sampler: str = ""  # class
    set_epoch: bool = False  # it can be told the epoch
    epoch: int | None = None  # that it has
    indices: int = 0  # that were compared
    location: str | None = None  # that iterates over the loader


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedNumbers(StepFact, topic="alone:numbers", scope=Scope.SHARED):
    """Torch's generators were in the same state at the start of several epochs, and training draws from them.

    Or the data set holds a generator.
    """

    epochs: int = 0  # in a row
    steps: int = 0  # likewise, where each step draws the same
    workers: int = 0  # of a loader, each of which draws from its copy of a generator
    name: str | None = None  # of that: "Pairs.rng"
    location: str | None = None  # that iterates over the loader, calls backward, or draws from that generator


@dataclass(frozen=True, slots=True, kw_only=True)
class Items(StepFact, topic="items"):
    """The items that the k-th DataLoader delivered in an epoch for some fixed indices, the same on all ranks."""

    #: index -> digests of its numbers (labels, as a rule) and of its tensors; empty where there are none
    items: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    exact: bool = False  # batches are put together by torch, in the order of their indices
    whole: bool = False  # all tensors hold whole numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedDeliveries(StepFact, topic="alone:deliveries", scope=Scope.SHARED):
    """The number of a loader's batches that were equal to the one delivered before, with the first ones.

    Or that all indices that it has drawn for training are a few of the data set.
    """

    batches: int
    again: int  # of these
    workers: int = 0
    inside: str | None = None  # what is the same within each of them: all "rows", or both "views"
    drawn: int = 0  # indices, where they were few different ones
    different: int = 0  # of these
    length: int | None = None  # of the data set
    location: str | None = None  # that iterates over the loader


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut(StepFact, topic="alone:left-out", scope=Scope.SHARED):
    """Batches at the start of each epoch that a loader delivered and that no step was trained on."""

    batches: int  # in each of the last two epochs
    of: int
    location: str | None = None  # that iterates over the loader


@dataclass(frozen=True, slots=True, kw_only=True)
class InputStatistics(StepFact, topic="inputs"):
    """Statistics of the inputs of the k-th DDP's first layer with weights, in its first training forwards."""

    layer: str  # class
    mean: float
    std: float
    min: float
    max: float
    #: How far the values, times 255 and 255 again, are from whole numbers at most; None: they are not that small.
    from_bytes: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationInputs(StepFact, topic="evaluated"):
    """Statistics of that layer's inputs in the k-th DDP's first evaluation forwards, beside those in training."""

    layer: str  # class
    mean: float
    std: float
    trained_mean: float
    trained_std: float
    forwards: int = 0  # of training, behind which inputs that are trained on were looked at again: no evaluation


#: Between the forwards of DDPs and the loads, as a batch is made, in the forwards.
DrawingPlace = Literal["loop", "loading", "forward"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws(Struct):
    """The draws from one generator in one part of each of the last checked steps."""

    place: Literal[
        "loop", "loading", "forward"
    ]  # between the DDP's forwards and loads, as a batch is made, in forwards
    generator: str  # "torch", "cuda:0", "random", "numpy", or the variable that holds it: "rng (numpy)"
    state: str  # digest of its state as the step ends
    numbers: int | None = None  # at least so many in a step, the median; None where it does not show
    steps: int = 0  # checked steps in a row


@dataclass(frozen=True, slots=True, kw_only=True)
class Input(Struct):
    """An input tensor of a DDP's forward."""

    digest: str
    rows: int  # length of the first dimension
    elements: int
    changed: bool = False  # another one than in the checked step before


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawingLine(Struct):
    """A call in the training loop whose function draws random numbers by its name, without a generator of its own."""

    location: str
    function: str
    family: str = "torch"  # what it is called on, if that is a name: "random", "rng", "x"; "numpy" for `numpy.random`
    chooses: bool = False  # which sample, or an order, rather than a value to compute with


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomDraws(StepFact, topic="draws"):
    """The training loop's draws in each of many checked steps; announced again after four times as many."""

    draws: tuple[Draws, ...] = ()
    inputs: tuple[Input, ...] = ()  # of this step's forwards
    loaded: bool = False  # a DataLoader has delivered this step's batch
    calls: tuple[DrawingLine, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets(StepFact, topic="targets"):
    """The targets of a rank's losses so far, if each was one loss function; announced again after twice as many."""

    loss: str  # the loss function, as in the graph: "NllLoss"
    reads: int = 0  # losses whose targets were read
    seen: int = 0  # labels, or rows of other targets
    classes: int | None = None
    counts: tuple[
        int, ...
    ] = ()  # of the labels by class, where these are not many; a list that comes again counts once
    whole: bool = False  # each loss had as many labels of each class, in another order: all samples, most likely
    chance: float | None = None  # the loss of the best answer that is the same for all inputs; None: not known
    fixed: bool = False  # the targets were the same in each loss
    #: What each of the last losses was divided by: its labels that count, or a number of the script's; 0: not known.
    numbers: tuple[float, ...] = ()


LOSS_FUNCTIONS = "loss functions"


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings(StepFact, topic="loss_settings"):
    """The settings of the k-th loss of a program that were constant since the last announcement."""

    location: str | None = None  # of its backward
    #: `LOSS_FUNCTIONS` -> their names, " + " between them; "function.setting" -> number, or "(shape):digest"
    settings: Mapping[str, str] = field(default_factory=dict)
    #: Labels that this rank's losses of the step `counted` are sums over, as a part of the number that divides them;
    #: None where the losses are no such sums.
    share: float | None = None
    counted: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered(Announcement, topic="gathered"):
    """The n-th list of tensors gathered from all ranks without a gradient, before a backward."""

    location: str | None = None
    shapes: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement(StepFact, topic="agreement"):
    """Digests of the model's weights and of its output for the n-th batch given to `agree`."""

    output: str
    weights: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Equivalence(Announcement, topic="equivalence"):
    """The measured difference between the ranks and one process; by `ddpdebug equivalence` only (ci/equivalence.py)."""

    world: int
    step: int | None = None  # the first that differs
    quantity: str | None = None  # "gradient", "update", "initial parameter"; "parameter": no rank has it
    dtype: str = ""  # the coarsest that was computed in
    batch_norm: bool = False  # the model has some
    #: What is further apart than rounding explains: name -> ratio, rest, difference relative to the largest element.
    off: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)
    bound: float | None = None  # of what rounding explains, relative to the largest element
    compared: int = 0  # names
    without_batch_norm: str | None = None  # "agree" or "differ": with its statistics fixed
    shards: str | None = None  # "ranks" or "batch": whose losses the loss of the whole batch is made of
    mesh: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # dimension -> this rank's coordinate, size
    #: Of what differs, what the ranks' own gradients over a dimension make: name -> "sum over tp", "mean over dp".
    adds_up: Mapping[str, str] = field(default_factory=dict)
    #: The first module whose output is no part of that of one process, after its place in the order.
    output: tuple[int, str] | None = None


# --- how the ranks go on ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Place(Announcement, topic="place"):
    """The node and address of a rank, sent at the start; no rule judges it."""

    node: str
    local_rank: int
    metrics: str | None = None  # address


@dataclass(frozen=True, slots=True, kw_only=True)
class Device(Announcement, topic="place"):
    """The GPU of a rank, sent with its first step there; no rule judges it."""

    gpu_uuid: str
    device: str = ""  # as torch names it: "cuda:1"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedGrowth(Struct):
    """Memory that is meant to grow."""

    what: str
    bytes: int | None = None  # at most; None: without a limit


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredGrowth(Announcement, topic="growth"):
    """All growth that the user has declared so far (`expect_growth`)."""

    bare: ClassVar[bool] = True

    declared: tuple[ExpectedGrowth, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class End(Announcement, topic="end"):
    """The last announcement of a rank."""

    steps: Mapping[str, int]  # optimizer -> steps taken
    reason: str  # "finished", "stopped", "interrupted" or "exception: ..."
    last_states: int = 0  # rows with `Flag.LAST_STATE` that it has sent
    entered: Mapping[str, int] = field(default_factory=dict)  # group -> collectives in all, as far as torch tells


_MAX_REASONS, _MAX_TEXT = 16, 200


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCoverage(Announcement, topic="coverage"):
    """The coverage of one rank, by its own account.

    Args:
        steps: optimizer steps whose row it made.
        made: optimizer steps that torch has taken on it, seen or not.
        by_hand: of `steps`, updates that the script makes without an optimizer.
        backwards: backward passes.
        wrappers: DDPs that it watches.
        parameters: parameters of its optimizers.
        unwatched: why parameters of these are not compared -> how many.
        left_out: likewise, of those that differ between ranks on purpose.
        off: parts of ddpdebug that failed on it -> what they said.
        children: processes that the script has started by multiprocessing, without the workers of libraries.
        evaluations: those of which no validation loss was seen.
        replayed: optimizer steps that CUDA graphs have taken, which nobody sees.
        sharding: what is compared of DTensors, in words.
    """

    rank: int = 0
    steps: int = 0
    made: int = 0
    by_hand: int = 0
    backwards: int = 0
    wrappers: int = 0
    parameters: int = 0
    unwatched: Mapping[str, int] = field(default_factory=dict)
    left_out: Mapping[str, int] = field(default_factory=dict)
    off: Mapping[str, str] = field(default_factory=dict)
    children: int = 0
    evaluations: int = 0
    replayed: int = 0
    sharding: str = ""

    @property
    def remarkable(self) -> bool:
        """Whether the account contains something to report."""
        return bool(self.unwatched or self.left_out or self.off or self.children or self.by_hand or self.replayed)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> RankCoverage:
        """Parse a rank's coverage from untrusted JSON; raise ValueError if it is malformed."""
        counts = ["rank", "steps", "made", "by_hand", "backwards", "wrappers", "parameters", "children"]
        counts += ["evaluations", "replayed"]
        try:
            values: dict[str, Any] = {name: int(record.get(name, 0)) for name in counts}
            for name in ("unwatched", "left_out"):
                values[name] = {short(key): int(count) for key, count in table_items(record.get(name))}
            values["sharding"] = short(record.get("sharding") or "")
            values["off"] = {short(key): short(text) for key, text in table_items(record.get("off"))}
        except (TypeError, AttributeError, OverflowError) as error:
            raise ValueError(str(error)) from None
        return cls(**values)


# --- how a rank fails -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CutBackward(Struct):
    """A backward that was ended by an exception which the script caught."""

    error: str  # class and text
    step: int | None = None
    location: str | None = None  # of the backward


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure(Announcement, topic="alone:failure", scope=Scope.ALONE):
    """The exception that ends a rank."""

    reason: str  # "exception: ..."
    step: int | None = None  # the newest
    missing: tuple[str, ...] = ()  # parameters without a gradient in it
    raised_in: int | None = None  # the step that it was heading for
    location: str | None = None  # the user's line that was running, the innermost
    phase: str | None = None  # "forward", "loss", "backward", "optimizer" or "between"
    module: str | None = None  # that ran, or whose gradients were due
    named: tuple[str, ...] = ()  # parameters that the text names, or means by their positions
    tensors: Mapping[str, str] = field(default_factory=dict)  # what torch's function was given: "float32 [4, 9]"
    cut_short: CutBackward | None = None  # the backward before, where it has not come to its end
    blocking: bool = False  # the device was waited for after each launch (CUDA_LAUNCH_BLOCKING): the line is that of it


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryState(Announcement, topic="alone:memory", scope=Scope.ALONE):
    """The memory use of a rank while an allocation fails on another one; see forensics/memory/oom.py. In bytes."""

    failed: Literal[False] = False
    phase: str | None = None  # "forward", "loss", "backward", "optimizer" or "between"
    rank: int = 0
    world: int = 1
    step: int | None = None
    steps: int = 0  # taken before
    device: bool = False  # the numbers are those of a device, otherwise of the process
    allocated: int = 0
    reserved: int = 0
    peak: int = 0
    limit: int = 0
    sample: Mapping[str, int] = field(default_factory=dict)  # every number of `probes.memory.MemorySample`
    #: parameters, gradients, optimizer_state, buffers, other; gradients that could not be read: gradients_and_other
    split: Mapping[str, int] = field(default_factory=dict)
    largest: Mapping[str, str] = field(default_factory=dict)  # module -> what its parameters and their like take
    operation: str | None = None  # the autograd node that ran
    lines: Mapping[str, int] = field(default_factory=dict)  # by the line that allocated, with a memory history
    modules: Mapping[str, int] = field(default_factory=dict)  # by the module that ran
    shapes: tuple[tuple[int, ...], ...] = ()  # of the newest forward's inputs
    elements: int = 0  # of the inputs of this step's largest forward
    largest_elements: int = 0  # likewise, of all steps before
    curve: tuple[tuple[int, int, int], ...] = ()  # (step, bytes, elements) at the ends of the last steps
    directory: str = ""  # in the run directory, of the rank's summaries


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationFailure(MemoryState):
    """A rank's failed allocation, and the use of memory at that moment."""

    failed: Literal[True] = True  # type: ignore[assignment]  # what tells the two apart
    module: str | None = None  # path
    location: str | None = None
    requested: int | None = None  # bytes, as far as the error says it
    error: str = ""


# --- how the training loop is made ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInput(StepFact, topic="alone:loss", scope=Scope.SHARED):
    """The origin of the input of a loss for logits, or for log probabilities, from its graph; once for each line."""

    kind: Literal["input"] = "input"
    loss: str  # the loss function, as in the graph: "NllLoss"; "CrossEntropy" with soft or smoothed targets
    #: The two operations that made it, the last one first, without those that change its form only: "LogSoftmax".
    before: tuple[str, ...] = ()
    shape: tuple[int, ...] = ()
    #: Of logarithms of probabilities what these add up to, at most; None: not in host memory.
    total: float | None = None
    location: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRange(StepFact, topic="alone:loss", scope=Scope.SHARED):
    """The range of a binary loss's targets; once for each line, and for each range in whole numbers."""

    kind: Literal["range"] = "range"
    loss: str  # the loss function, as in the graph
    low: float
    high: float
    location: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetCases(StepFact, topic="alone:loss", scope=Scope.SHARED):
    """Targets other than 1 and -1 of a loss that has one case for each; once for each line."""

    kind: Literal["cases"] = "cases"
    loss: str  # "CosineEmbedding", "HingeEmbedding", "SoftMargin"
    neither: int  # so many of them
    targets: int
    location: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LossBroadcast(StepFact, topic="alone:loss", scope=Scope.SHARED):
    """A loss whose predictions and targets were broadcast to a larger shape; once for each line and form."""

    kind: Literal["broadcast"] = "broadcast"
    loss: str  # the loss function, as in the graph
    prediction: tuple[int, ...] = ()  # shape
    result: tuple[int, ...] = ()  # shape of the table
    explicit: bool = False  # the prediction was given a new dimension for it
    layer: str | None = None  # class of one that took the samples for time; `prediction` is the shape of its input
    #: What else takes one dimension for another: a view of a layer's result whose shape is `prediction`, a softmax
    #: before the loss, or one of attention weights of that shape, which are `summed` over these dimensions.
    mixed: Literal["view", "softmax", "attention"] | None = None
    summed: tuple[int, ...] = ()
    location: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftmaxOfOne(StepFact, topic="alone:loss", scope=Scope.SHARED):
    """A softmax over a single entry in a loss, which is constant for any input; at the first loss of a line."""

    kind: Literal["softmax of one"] = "softmax of one"
    operation: str  # as in the graph: "LogSoftmax"
    shape: tuple[int, ...] = ()
    location: str | None = None  # of the loss, as far as the source shows it, else of backward


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialLoss(StepFact, topic="alone:loss", scope=Scope.SHARED):
    """The first loss of a run of a classifier."""

    kind: Literal["initial"] = "initial"
    classes: int
    loss: float
    location: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelCounts(StepFact, topic="alone:loss", scope=Scope.SHARED):
    """The number of labels of each class over a whole run."""

    kind: Literal["labels"] = "labels"
    classes: int
    seen: int = 0  # labels
    reads: int = 0  # losses whose labels were read
    present: int = 0  # classes that were seen
    largest: int = 0  # the most frequent class
    share: float = 0.0  # of it
    weighted: bool = False  # the classes carry weights in the loss
    padding: int | None = None  # the class that the model's embedding pads with, where the loss averages as it is
    padded: int = 0  # labels of it


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingParameters(StepFact, topic="alone:audit", scope=Scope.SHARED):
    """Parameters that get gradients but belong to no optimizer; see probes/training_loop/parameter_ownership.py."""

    kind: Literal["missing"] = "missing"
    missing: tuple[str, ...] = ()  # the first ones
    number: int = 0  # of all
    share: float = 0.0  # of the models' trainable elements
    orphans: tuple[str, ...] = ()  # parameters of optimizers that get no gradient and that no model has


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedParameters(StepFact, topic="alone:audit", scope=Scope.SHARED):
    """Parameters that need no gradient, got none, and were changed by a step; see training_loop/frozen_moves.py."""

    kind: Literal["moved"] = "moved"
    names: tuple[str, ...] = ()  # the first ones
    number: int = 0  # of all
    location: str | None = None  # of the step


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenTies(StepFact, topic="alone:audit", scope=Scope.SHARED):
    """Parameters that train and were one and the same when the model was built; see probes/ties.py."""

    kind: Literal["untied"] = "untied"
    pairs: tuple[tuple[str, str], ...] = ()  # the first ones


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftInWeights(StepFact, topic="alone:audit", scope=Scope.SHARED):
    """Weights that were put into a model for an evaluation and are trained on; see training_loop/put_in.py."""

    kind: Literal["left in"] = "left in"
    names: tuple[str, ...] = ()  # some of them
    frozen: bool = False  # none of these is trained
    since: int  # the step after the first such evaluation
    location: str | None = None  # of the newest such evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowingHooks(StepFact, topic="alone:audit", scope=Scope.SHARED):
    """Hooks on a module or its parameters that become more with each step; see training_loop/growing_hooks.py."""

    kind: Literal["hooks"] = "hooks"
    since: int  # the step in which they began to
    module: str
    function: str  # that is registered
    number: int  # of them, after `step`
    location: str | None = None  # of the function


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenParameters(StepFact, topic="alone:audit", scope=Scope.SHARED):
    """The frozen parameters at an optimizer step: their share of the optimizer's, the output layer, all but norms."""

    kind: Literal["frozen"] = "frozen"
    share: float  # of the elements, as this step begins
    first: float | None = None  # likewise, as the second step began
    norms: int = 0  # parameters that train where these are those of normalisation layers only, else 0
    output: tuple[str, ...] = ()  # of the layer that makes the output, frozen while all before it trains
    attribute: tuple[str, ...] = ()  # modules that train although somebody has set their attribute `requires_grad`


@dataclass(frozen=True, slots=True, kw_only=True)
class DetachedParameters(StepFact, topic="alone:audit", scope=Scope.SHARED):
    """Parameters that get no gradient, because the forward detaches its graph after them."""

    kind: Literal["detached"] = "detached"
    names: tuple[str, ...] = ()
    after: str = ""  # path of the last module before the cut
    before: str = ""  # path of the first one behind it


@dataclass(frozen=True, slots=True, kw_only=True)
class UnregisteredParameters(StepFact, topic="alone:audit", scope=Scope.SHARED):
    """Parameters in the model's computation that belong to no model and no optimizer."""

    kind: Literal["unregistered"] = "unregistered"
    names: tuple[str, ...] = ()  # where they hide: "layers[0].weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedMask(StepFact, topic="alone:attention", scope=Scope.SHARED):
    """A mask of zeros and ones that attention has added to its scores."""

    shape: tuple[int, ...] = ()
    zeros: float = 0.0  # share of the mask
    location: str | None = None  # of the model's call


@dataclass(frozen=True, slots=True, kw_only=True)
class NoGradPart(Struct):
    """A module that ran without gradients, none of whose parameters got one."""

    path: str
    names: tuple[str, ...] = ()  # of its parameters
    location: str | None = None  # that calls it
    in_eval: bool = False  # while the model around it was in train mode
    copy_of: str | None = None  # path of a module of the same class and shapes that trains
    written: bool = False  # something has changed its parameters since


@dataclass(frozen=True, slots=True, kw_only=True)
class NoGradParts(StepFact, topic="alone:audit", scope=Scope.SHARED):
    """The largest modules that ran without gradients in the first forward, although an optimizer has their parameters.

    None of these has got a gradient since then, and none was frozen.
    """

    kind: Literal["no_grad"] = "no_grad"
    parts: tuple[NoGradPart, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainModeValidation(StepFact, topic="alone:validation", scope=Scope.SHARED):
    """Forwards in the wrong mode: those without gradients, or those of a model beside the trained one.

    Args:
        beside: "stays" is a model that nobody changes and that runs in train mode, "follows" one that is written as an
            average is, runs in eval mode, and whose statistics stay, "never" a copy that evaluations alone use and that
            has not changed; of the trained model itself "frozen" are norms
            of a frozen part that count on, "last" such whose statistics are those of the newest batch.
    """

    forwards: int = 0
    location: str | None = None
    since: int = 0  # steps since the evaluation before
    collected: bool = False  # what they were given was trained on next; see probes/training_loop/rollouts.py
    beside: str | None = None
    names: tuple[str, ...] = ()  # of the modules in that model, behind its class


@dataclass(frozen=True, slots=True, kw_only=True)
class DropoutCall(Struct):
    """A call of a dropout function in the source, or of the noise function of a hand-written dropout."""

    function: str  # "dropout", or "randn_like" and others where noise is added or a mask multiplied
    p: float | None = None  # None: the source does not say
    location: str | None = None
    active: bool | None = None  # None: only running the code would tell


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawingModule(Struct):
    """A module whose own code drew random numbers, and the dropout functions in its source."""

    path: str
    class_name: str = field(metadata=called("class"))
    training: bool = False  # it was in train mode itself
    draws_otherwise: bool = False  # its source calls something else that may have drawn
    calls: tuple[DropoutCall, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalDraws(StepFact, topic="alone:chance", scope=Scope.SHARED):
    """The modules that drew random numbers in a forward in eval mode, once; see training_loop/eval_dropout.py."""

    modules: tuple[DrawingModule, ...] = ()
    reconstructs: bool = False  # a loss compared with what the model was given


@dataclass(frozen=True, slots=True, kw_only=True)
class UnusedSchedule(StepFact, topic="alone:schedule", scope=Scope.SHARED):
    """A scheduler that was never stepped, or so often that it reaches its end too early or not at all.

    Told of one that nothing had stepped when the run came to its end, or whose length was counted in another unit.
    """

    class_name: str = field(metadata=called("class"))
    steps: int = 0  # of its optimizer
    calls: int = 0  # of the scheduler
    length: int | None = None  # calls until its rate is at its lowest, of one that was stepped
    left: float = 0.0  # of the rate then, as a share of what it begins with
    passes: int = 0  # backward passes, where the run came to its end
    world: int | None = None  # ranks, where its optimizer stepped to that end
    begins_again: bool = False  # it is at its start, and its optimizer has come with `steps` behind it
    cuts: int = 0  # of the rate, by a measure that has become worse with each call
    measures: tuple[float, ...] = ()  # the first and the last of these
    location: str | None = None  # where it is stepped


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored(StepFact, topic="alone:restored", scope=Scope.SHARED):
    """The state that a load restored, or that an optimizer begins with; see training_loop/resume.py.

    Args:
        kind: names that have not fitted, parameters that were overwritten since, a load of what the model has anyway,
            names of an optimizer's parameters that got the state of others, an average of the weights that was left
            out, an optimizer without state whose schedule goes on, one whose state was left in the checkpoint that its
            parameters are from, a schedule that is over as the optimizer begins, what was built anew again and again,
            or an optimizer that comes with steps behind it.
    """

    kind: Literal[
        "names", "overwritten", "itself", "order", "average", "optimizer", "left", "ended", "rebuilt", "resumed"
    ]
    class_name: str = field(metadata=called("class"))
    names: tuple[str, ...] = ()  # of parameters that were not loaded, the first ones
    fitted: int = 0  # parameters that were
    number: int = 0  # of all
    others: int = 0  # names in what was loaded that the module has not
    schedule: str | None = None  # class
    calls: int = 0  # of that, or how many began anew
    steps: int = 0  # of the optimizer, or of the one before; the length of a schedule
    location: str | None = None  # of the load


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChange(StepFact, topic="alone:leak", scope=Scope.ALONE):
    """The effect of another token on a model whose targets are its own input tokens.

    See forensics/target_leak.py. Changes are shares of the largest value of the same tensor.
    """

    #: "moved" by one position against the inputs, "same": beside them, or "twice": moved by two; "trained": what an
    #: evaluation was given had been trained on, `length` samples.
    targets: str
    before: float = 0.0  # of the outputs before the token
    here: float = 0.0  # of that at its place
    behind: float = 0.0  # of those behind it
    summary: float = 0.0  # of what a module has made of a whole text
    module: str | None = None  # path of the first that hands the token on to positions before it
    position: int = 0  # of the token
    length: int = 0  # of the text
    first_loss: float = 0.0
    loss: float = 0.0  # now
    location: str | None = None  # that called backward


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleMixing(StepFact, topic="alone:mixing", scope=Scope.ALONE):
    """What a sample's outputs owe to the others of its batch, or to its place in it; see forensics/sample_mixing.py."""

    samples: int
    change: float  # of the sample that changes least, as a share of the largest output; 0 for independent ones
    operation: str | None = None  # the first that makes of independent rows some that are not
    module: str | None = None  # path of that in which it runs
    location: str | None = None  # of the operation


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddingEffect(StepFact, topic="alone:padding", scope=Scope.ALONE):
    """The effect of less padding on a model that is given a mask of it; see forensics/padded.py."""

    change: float  # of outputs at real positions, as a share of the largest
    length: int  # positions of the batch
    kept: int  # of these, without the padding that was taken away
    location: str | None = None  # of the forward's call


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationLine(StepFact, topic="alone:evaluation", scope=Scope.ALONE):
    """The line whose losses, without gradients and in eval mode, are the validation loss from now on.

    Said again when another line takes its place.
    """

    location: str | None = None
    samples: int | None = None  # of the data set that was begun last
    batches: int = 0  # of this evaluation
    source: str = ""  # what computes the loss: "by nn.MSELoss"


# --- hangs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang(Announcement, topic="alone:hang", scope=Scope.ALONE):
    """A hang: ranks wait in vain, as judged by one rank; see progress/waits.py.

    Args:
        kind: the ranks that are waited for have left, or have made other calls, or wait in a circle, or give no sign,
            or do not move, or are at work for far longer than ever before in this run.
        judge: the rank that has judged, and `number` of its hangs.
        ranks: that are waited for and do not wait themselves; all that take part where they cannot be distinguished.
        runs: such a rank gives no sign of life, but runs: code that lets no other thread run may be done yet.
        sides: ranks -> what they have called, of calls that differ, "0,2" -> "all_reduce #6".
        parted: rank -> the first call in which its notes differ from the others', in words.
        waits: ranks -> what they wait in, in words.
        where: rank -> what one that is waited for does, in words.
        stacks: ranks -> frames, innermost first, of ranks in the same place.
        waited: seconds so far.
    """

    kind: Literal["left", "mismatch", "cycle", "silent", "stuck", "busy"]
    judge: int = 0
    number: int = 0
    step: int | None = None
    ranks: tuple[int, ...] = ()
    phase: str | None = None
    location: str | None = None  # of the first of `ranks`
    group: str | None = None  # whose collective is waited in
    sides: Mapping[str, str] = field(default_factory=dict)
    difference: str | None = (
        None  # in what calls differ: "operation", "shape", "dtype", "root", "order"; "unknown" where they do not
    )
    undecided: tuple[tuple[int, ...], ...] = ()
    parted: Mapping[str, str] = field(default_factory=dict)
    waits: Mapping[str, str] = field(default_factory=dict)
    where: Mapping[str, str] = field(default_factory=dict)
    calls: Mapping[str, int] = field(default_factory=dict)  # rank -> collectives of the group so far
    stacks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    runs: bool = False
    blocked_in: str | None = None  # kind of thing that the first of `ranks` waits for, "lock"
    waited: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HangOver(Announcement, topic="alone:hang-over", scope=Scope.ALONE):
    """A hang that was announced has ended: the ranks go on."""

    number: int
    judge: int  # the rank that has announced it
    seconds: float  # that it has lasted


# --- topics -----------------------------------------------------------------------------------------------------------


def _by_topic(kinds: Iterable[object]) -> Mapping[str, tuple[type[Announcement], ...]]:
    topics: dict[str, tuple[type[Announcement], ...]] = {}
    for kind in kinds:
        if isinstance(kind, type) and issubclass(kind, Announcement) and hasattr(kind, "topic"):
            topics[kind.topic] = (*topics.get(kind.topic, ()), kind)
    return topics


#: The classes of each topic, all of this file. Which one a value belongs to, its fields tell.
TOPICS = _by_topic(list(vars().values()))


def kinds_of(topic: str) -> tuple[type[Announcement], ...]:
    """Return the classes of a topic, given with its number as it was sent; empty for an unknown topic."""
    name, _, number = topic.rpartition(":")
    return TOPICS.get(topic) or (TOPICS.get(name, ()) if number.isdecimal() else ())


def scope_of(topic: str) -> Scope:
    """Return the scope of a topic: the ranks whose announcements are judged together."""
    return next((kind.scope for kind in kinds_of(topic)), Scope.ALL_RANKS)


def read_announcement(topic: str, value: Any) -> Announcement | None:
    """Return the announcement from a topic and a JSON value; None if it is malformed or the topic is unknown."""
    for kind in kinds_of(topic):
        if (found := from_json(kind, value)) is not None:
            return found
    return None


def table_items(value: object, most: int = _MAX_REASONS) -> list[tuple[str, Any]]:
    """Return the first items of a table, an empty list for None; raise TypeError for anything else."""
    if value is None:
        return []
    if not isinstance(value, Mapping):
        raise TypeError("not a table")
    return list(value.items())[:most]


def short(value: object) -> str:
    """Return a text from a job, cut if it is long."""
    return str(value)[:_MAX_TEXT]
