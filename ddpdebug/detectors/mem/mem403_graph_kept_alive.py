"""MEM403: autograd graphs are kept alive across steps."""

from __future__ import annotations

from typing import Any

from ddpdebug.detectors.examples import growing, holders
from ddpdebug.detectors.kinds import Examples, Fields, Finding, Findings, Severity, Step, Threshold
from ddpdebug.detectors.mem.growth import Growth, Trend, TrendRule, best_holder, declared_bytes, holder_text, used
from ddpdebug.detectors.mem.mem402_memory_growth import MemoryGrowth
from ddpdebug.detectors.mem.mem406_host_memory_growth import HostMemoryGrowth
from ddpdebug.detectors.mem.sizes import MIB, size_text
from ddpdebug.schema.details import Holder


class GraphKeptAlive(TrendRule):
    """Tensors that still carry a `grad_fn` survive their step, more of them from step to step, and hold their graphs.

    Impact: memory grows every step. A graph that never ran backward keeps all its activations; one that did keeps only
    its nodes, which is small but endless, and slows garbage collection.

    Diagnosis: go to the named line: it fills the named holder. `grown` is measured over the same steps and may have
    further causes. If no holder is named, use `gc.get_referrers(tensor)` on a tensor with a `grad_fn` from an earlier
    step. Look at evaluation code first: a summed validation loss without `no_grad` holds every activation of the pass.

    Causes:
    - `tracebacks`: a kept exception, whose traceback keeps the frames of the forward and what they hold
    - `hook`: outputs or features that a hook keeps
    - `losses.append(loss)` or `total += loss` instead of the detached value
    - an evaluation loss summed as a tensor without `torch.no_grad()`
    - a recurrent state, memory or target that is carried into the next step without `detach()`
    - outputs or features stored on `self` in forward
    - a metric object that keeps its inputs

    Remedy:
    - `tracebacks`: keep `str(error)`, or `error.with_traceback(None)`
    - `hook`: store `output.detach()` in the hook
    - store `loss.item()` or `loss.detach()` at the named line; `total += loss.detach()`
    - evaluate under `with torch.no_grad():`
    - `state = state.detach()` at each truncation boundary
    """

    code = "MEM403"
    severity = Severity.ERROR
    title = "autograd graphs are kept alive across steps"
    wants = ("holders",)
    graphs_held = Threshold(
        6,
        "graphs of a holder, below which it is the step's own `loss` or `output`",
        source="half of `graphs_kept`",
    )
    graphs_kept = Threshold(
        12,
        "steps whose graphs have been added since their number last fell",
        source="a loop that logs the mean loss of its last ten steps keeps ten of them, which does no harm",
    )
    memory_growth_device = MemoryGrowth.memory_growth_device
    memory_growth_host = HostMemoryGrowth.memory_growth_host
    memory_blocks_early = Threshold(
        4,
        "shortest blocks after which it is worth asking who holds the memory",
        source="a short run ends before there are six",
    )
    fires_on = Examples(
        lambda: growing("live_graphs", lambda step: step, 30, holders=holders("losses", graphs=30)),
        lambda: growing("live_graphs", lambda step: step, 60),
        lambda: growing(
            "host_private_bytes", lambda step: 300 * MIB + 3 * MIB * step, 70, holders=holders("val", graphs=60)
        ),
        lambda: growing(
            "host_private_bytes", lambda step: 300 * MIB + 3 * MIB * step, 44, holders=holders("val", graphs=30)
        ),
    )
    silent_on = Examples(
        lambda: growing("live_graphs", lambda step: min(step, 2), 60),
        lambda: growing("live_graphs", lambda step: step % 10, 80, holders=holders("losses", graphs=9)),
        lambda: growing("host_private_bytes", lambda step: 300 * MIB + 3 * MIB * step, 70, holders=holders("cache")),
    )

    def __init__(self, config: Fields | None = None) -> None:
        super().__init__(config)
        self._counts: dict[int, tuple[int, int, int]] = {}  # rank -> (live graphs, when they last fell, that step)
        self._growth: dict[int, Growth] = {}
        self._since: int | None = None
        self._told: tuple[Finding, int] | None = None
        self._last: Step | None = None

    def can_show(self, step: Step) -> bool:
        return step.optimizer == 0 and self._since is None

    def suspects(self, step: Step) -> bool:
        return step.optimizer == 0 and self._since is not None and self._told is None

    def detect(self, step: Step) -> Findings:
        if step.optimizer != 0:
            return
        self._take(step)
        kept, ranks = self._kept(step), tuple(rank for rank in step.rows if self._suspicion(rank) is not None)
        if not kept and not ranks:
            self._since = self._told = None
            return
        self._since = step.step if self._since is None else self._since
        if self._told is not None:
            yield self._told[0]
            return
        found = best_holder(step, graphs=True)
        if found is not None and found[1].graphs >= self.graphs_held:
            yield self._report(step, kept or ranks, found[1])
        elif kept and step.step - self._since >= self.memory_patience:
            yield self._report(step, kept, None)

    def finish(self) -> Findings:
        if self._told is None and self._last is not None and (kept := self._kept(self._last)):
            yield self._report(self._last, kept, None)

    def _take(self, step: Step) -> None:
        self._last = step
        if step.chosen:  # who keeps most graphs is there in each step
            self._counts = {rank: counted for rank, counted in self._counts.items() if rank in step.rows}
            self._growth = {rank: growth for rank, growth in self._growth.items() if rank in step.rows}
        for rank, row in step.rows.items():
            count, low, since = self._counts.get(rank, (0, 0, step.step))
            fell = row.live_graphs < count
            low, since = (row.live_graphs, step.step) if fell else (low, since)
            self._counts[rank] = row.live_graphs, low, since
            if rank not in self._growth:
                least = self.memory_growth_device if row.device_allocated_bytes else self.memory_growth_host
                self._growth[rank] = Growth(least, self)
            self._growth[rank].add(step.step, used(row), declared_bytes(step, rank))

    def _kept(self, step: Step) -> tuple[int, ...]:
        return tuple(rank for rank in step.rows if self._gained(rank) >= self.graphs_kept)

    def _gained(self, rank: int) -> int:
        count, low, _ = self._counts.get(rank, (0, 0, 0))
        return count - low

    def _suspicion(self, rank: int) -> Trend | None:
        return self._growth[rank].suspicion(int(self.memory_blocks_early))

    def _report(self, step: Step, ranks: tuple[int, ...], holder: Holder | None) -> Finding:
        trends = [trend for rank in ranks if (trend := self._suspicion(rank)) is not None]
        first = min((self._counts[rank][2] for rank in ranks if self._gained(rank) >= self.graphs_kept), default=None)
        first = min((trend.since for trend in trends), default=0) if first is None else first
        graphs = max((self._gained(rank) for rank in ranks), default=0)
        evidence: dict[str, Any] = {"graphs": graphs} if graphs else {}
        if holder is not None:
            graphs = max(graphs, holder.graphs)
            first = min(first, max(0, step.step + 1 - graphs))  # growth shows late, the graphs go back to the first
            evidence["graphs"] = graphs
            evidence["holder"] = f"{holder_text(holder)} keeps the graphs of {graphs} steps"
        if trends:
            evidence["grown"] = size_text(max(trend.grown for trend in trends))
        finding = self.finding(
            step,
            step=first,
            ranks=ranks,
            subject=() if holder is None else (holder.name,),
            location=None if holder is None else holder.location,
            evidence=evidence,
        )
        self._told = finding, step.step
        return finding
