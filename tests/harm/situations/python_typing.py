"""Models that are generic, abstract, dataclasses, with metaclasses; hints and sources of their methods are read."""

import abc
import dataclasses
import functools
import inspect
import typing

import torch
from _report import report, start, train
from torch import nn

T = typing.TypeVar("T")
made = []


class Registered(type):
    def __call__(cls, *args, **kwargs):
        made.append(cls.__name__)
        return super().__call__(*args, **kwargs)

    def __instancecheck__(cls, value):
        made.append("asked")
        return super().__instancecheck__(value)


class Base(nn.Module, typing.Generic[T], metaclass=type("Both", (Registered, abc.ABCMeta), {})):
    kinds = {}

    def __init_subclass__(cls, kind="none", **kwargs):
        super().__init_subclass__(**kwargs)
        Base.kinds[kind] = cls

    @abc.abstractmethod
    def forward(self, x: torch.Tensor) -> torch.Tensor: ...


class Net(Base[int], kind="net"):
    __slots__ = ("note",)

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(16, width)
        self.note = "kept"

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return self.layer(x) * scale


@dataclasses.dataclass(eq=False)
class Data(nn.Module):
    width: int = 4
    count: int = 0

    def __post_init__(self):
        super().__init__()
        self.layer = nn.Linear(16, self.width)

    @functools.lru_cache(maxsize=None)
    def factor(self, step):
        self.count += 1
        return 1 + step

    def forward(self, x):
        return self.layer(x) * self.factor(0)


@functools.singledispatch
def loss_of(out):
    raise TypeError


@loss_of.register
def _(out: torch.Tensor):
    return out.square().mean()


start()
models = [Base.kinds["net"](), Data()]
losses, optimizers = [], []
for model in models:
    optimizers.append(torch.optim.SGD(model.parameters(), 0.01))
    losses += train(model, optimizers[-1], loss_of=loss_of)
kind = type(models[0])
print(typing.get_type_hints(kind.forward), inspect.signature(models[0].forward), kind.__orig_bases__)
print(inspect.getsource(kind.forward), inspect.getsourcelines(Data.forward)[1], inspect.getmodule(kind.forward).__name__)
print(inspect.isfunction(kind.forward), kind.__abstractmethods__, models[0].note, dataclasses.asdict(Data(2))["width"])
print(Data.factor.cache_info(), inspect.getattr_static(models[0], "forward") is kind.__dict__["forward"])
report(models, optimizers, losses, made=made)
