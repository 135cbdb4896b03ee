"""Small trainings with one mistake each, and the same ones without it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

CLASSES = 4
Training = tuple[nn.Module, Any, torch.optim.Optimizer | None, list[Any]]


def data(count: int = 8, size: int = 64, features: int = 12) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Blobs that a linear layer can tell apart."""
    generator = torch.Generator().manual_seed(5)
    centres = torch.randn(CLASSES, features, generator=generator) * 1.5
    batches = []
    for _ in range(count):
        labels = torch.randint(0, CLASSES, (size,), generator=generator)
        batches.append((centres[labels] + torch.randn(size, features, generator=generator), labels))
    return batches


def images(count: int = 4, scale: float = 1.0, shift: float = 0.0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(6)
    return [
        (
            torch.rand(16, 3, 12, 12, generator=generator) * scale + shift,
            torch.randint(0, CLASSES, (16,), generator=generator),
        )
        for _ in range(count)
    ]


def mlp(*middle: nn.Module, inputs: int = 12, outputs: int = CLASSES) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(inputs, 32), nn.ReLU(), *middle, nn.Linear(32, outputs))


def convolutions() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def trained(model: nn.Module, batches: list[Any] | None = None, loss: Any = functional.cross_entropy) -> Training:
    return model, loss, sgd(model), data() if batches is None else batches


def relabelled(change: Any) -> list[Any]:
    return [(x, change(y)) for x, y in data()]


class Hidden(nn.Module):
    """Keeps its layers in a list, plain or not."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = kind([nn.Linear(12, 12), nn.Linear(12, 12)])
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


class Cut(nn.Module):
    """Cuts the graph between its layers, or not."""

    def __init__(self, *, cut: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body, self.head, self.cut = nn.Linear(12, 12), nn.Linear(12, CLASSES), cut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.body(x))
        return self.head(x.detach() if self.cut else x)


class Mixing(nn.Module):
    """Normalises over the batch, or over the features."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer, self.dim = nn.Linear(12, CLASSES), dim

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x * torch.softmax(x, self.dim))


class Dropping(nn.Module):
    """Drops in eval mode too, or only in training."""

    def __init__(self, *, always: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer, self.always = nn.Linear(12, CLASSES), always

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(functional.dropout(x, 0.5, training=self.always or self.training))


class Attention(nn.Module):
    """A layer of attention over tokens, with its mask or without it, and with dropout in training or in eval mode."""

    def __init__(self, *, causal: bool, drops: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.head, self.causal = nn.Embedding(20, 16), nn.Linear(16, 20), causal
        self.drops = drops  # in the mode `training`, or never

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)[:, None]
        p = 0.3 if self.drops is not None and (self.training or not self.drops) else 0.0
        return self.head(functional.scaled_dot_product_attention(x, x, x, None, p, is_causal=self.causal)[:, 0])


def tokens() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(8)
    rows = [torch.randint(0, 20, (8, 13), generator=generator) for _ in range(3)]
    return [(row[:, :-1], row[:, 1:]) for row in rows]


def texts() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of tokens, a few of which are frequent."""
    generator = torch.Generator().manual_seed(8)
    rows = [(torch.rand(16, 49, generator=generator) ** 6 * 20).long() for _ in range(6)]
    return [(row[:, :-1], row[:, 1:].flatten()) for row in rows]


def over_flat_tokens(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target)


def over_tokens(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.transpose(1, 2), target)


def without_head(*, forgotten: bool) -> Training:
    """Replaces the last layer after the optimizer was built."""
    model = mlp()
    optimizer = sgd(model)
    model[2] = nn.Linear(32, CLASSES)
    return model, functional.cross_entropy, optimizer if forgotten else sgd(model), data()


def of_another_model(*, other: bool) -> Training:
    """Trains with the optimizer of a model that was replaced."""
    model = mlp()
    return model, functional.cross_entropy, sgd(mlp() if other else model), data()


def stepped_twice() -> Training:
    model = mlp()
    return model, functional.cross_entropy, sgd(model), data()


def scaled(model: nn.Sequential, factor: float) -> nn.Sequential:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
    return model


def filled(model: nn.Sequential, at: int, value: float) -> nn.Sequential:
    nn.init.constant_(model[at].weight, value)
    return model


def biased(model: nn.Sequential, value: float) -> nn.Sequential:
    nn.init.constant_(model[0].bias, value)
    return model


def tower(activation: type[nn.Module], *, depth: int = 10, he: bool = False) -> nn.Sequential:
    torch.manual_seed(4)
    layers: list[nn.Module] = [nn.Linear(12, 32), activation()]
    for _ in range(depth):
        layers += [nn.Linear(32, 32), activation()]
    model = nn.Sequential(*layers, nn.Linear(32, CLASSES))
    if he:
        for layer in model:
            if isinstance(layer, nn.Linear):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
                nn.init.zeros_(layer.bias)
    return model
