"""Graphs are counted as long as anything of them lives."""

from __future__ import annotations

import torch
from torch import nn

from ddpdebug.probes.graph_lifetime import LiveGraphs, marked_step


def _step(graphs: LiveGraphs, model: nn.Module) -> torch.Tensor:
    loss = model(torch.ones(2, 3)).sum()
    graphs.mark(loss.grad_fn)
    loss.backward()
    return loss


def test_a_graph_that_is_dropped_is_not_counted() -> None:
    """The step's own graph is left out, earlier ones are gone."""
    graphs, model = LiveGraphs(), nn.Linear(3, 1)
    loss: torch.Tensor | None = None  # the newest is alive until the next takes its name
    for _ in range(5):
        loss = _step(graphs, model)
        assert graphs.end_step() == 0
    assert loss is not None
    _step(graphs, model)
    assert graphs.end_step() == 1


def test_every_way_to_keep_a_graph_counts() -> None:
    """In a list, through a sum, and through an activation above the loss."""
    for keep in ("list", "sum", "activation"):
        graphs, total, kept = LiveGraphs(), torch.zeros(()), []
        first, second = nn.Linear(3, 4), nn.Linear(4, 1)
        for step in range(6):
            hidden = first(torch.ones(2, 3))
            loss = second(hidden).sum()
            graphs.mark(loss.grad_fn)
            loss.backward()
            if keep == "sum":
                total = total + loss
            else:
                kept.append(loss if keep == "list" else hidden)
            del loss, hidden
            assert graphs.end_step() == step, keep
        kept.clear()
        del total
        assert graphs.end_step() == 0, keep


def test_marks_change_no_gradient() -> None:
    """A marked graph runs backward, under anomaly detection too, with the same result."""
    results = []
    for marked in (False, True):
        model = nn.Linear(3, 1, bias=False)
        nn.init.ones_(model.weight)
        with torch.autograd.set_detect_anomaly(True, check_nan=False):
            loss = model(torch.arange(6.0).view(2, 3)).square().sum()
            if marked:
                LiveGraphs().mark(loss.grad_fn)
            loss.backward()
        results.append(model.weight.grad.tolist())
    assert results[0] == results[1]


def test_a_mark_names_its_step() -> None:
    """What the search for holders reads."""
    graphs = LiveGraphs()
    graphs.end_step()
    leaf = torch.ones(2, requires_grad=True)
    node = (2 * leaf).grad_fn
    graphs.mark(node)
    assert marked_step(node) == 1
    assert marked_step((3 * leaf).grad_fn) is None
