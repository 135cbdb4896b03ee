"""RCP817: modules called in forward are not registered in the model."""

from __future__ import annotations

from ddpdebug.detectors.comparison import MAX_NAMES
from ddpdebug.detectors.examples import steps
from ddpdebug.detectors.kinds import EventRule, Examples, Facts, Fields, Severity
from ddpdebug.schema.announcements import UnregisteredParameters

_FACT = {"kind": "unregistered", "step": 1, "names": ["layers[0].weight", "layers[0].bias"]}


class UnregisteredModules(EventRule):
    """The forward uses parameters that are not in `model.parameters()`: their modules sit in a plain list or a dict.

    Impact: they are not in `parameters()`, not synchronised by DDP, not moved by `to(device)`, not saved in
    `state_dict`, and not switched by `train()` and `eval()`.

    Diagnosis: look up the named class in the model's `__init__` and find the container. Print
    `len(list(model.parameters()))` against the expectation. With unequal seeds per rank such modules differ from
    the start, and a comparison of registered parameters does not show it.

    Causes:
    - `self.layers = [nn.Linear(...), ...]` instead of `nn.ModuleList`
    - `self.heads = {...}` instead of `nn.ModuleDict`
    - a module made inside forward, so that it is new in every step
    - a module in a global or a function attribute, or hidden in a wrapper that is no `nn.Module`

    Remedy:
    - use `nn.ModuleList`, `nn.ModuleDict`, `nn.ParameterList`, and assign modules as attributes before DDP and the
      optimizer are built
    - old checkpoints lack these weights and need a migration
    - if a frozen helper is hidden on purpose (a teacher), keep it so, in eval mode and under `no_grad`
    """

    code = "RCP817"
    severity = Severity.ERROR
    title = "modules called in forward are not registered in the model"
    events = ("audit:unregistered",)
    fires_on = Examples(
        lambda: Facts(topic="alone:audit", values={0: _FACT, 1: _FACT}),
        lambda: (
            *steps(2),
            Facts(topic="alone:audit", values={1: {**_FACT, "names": ["a parameter of shape (4, 4)"]}}),
        ),
    )
    silent_on = Examples(
        lambda: steps(3),
        lambda: Facts(topic="alone:audit", values={0: {"kind": "frozen", "step": 1, "share": 0.9}}),
    )

    def judge(self, fact: UnregisteredParameters) -> Fields | None:
        return {"subject": fact.names[:MAX_NAMES], "evidence": {"parameters": len(fact.names)}}
