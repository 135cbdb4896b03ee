# title: The loss gets the probabilities that the model returns for its users, and expects logits
# source: constructed
# nproc: 1
# expect.codes: RCP802
# expect.ranks: all
# expect.subject: any
# expect.step: any
# plain_pytorch: silent
"""Languages of words, with a method for training and one for use."""
import os

import torch
from torch import Tensor, nn

FAULT = os.environ.get("FAULT") == "1"


class Languages(nn.Module):
    def __init__(self, letters: int = 27, languages: int = 6) -> None:
        super().__init__()
        self.letters = nn.EmbeddingBag(letters, 32)
        self.decide = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, languages))

    def forward(self, word: Tensor, probable: bool = False) -> Tensor:
        logits = self.decide(self.letters(word))
        return logits.softmax(dim=-1) if probable else logits


def words(gen: torch.Generator, n: int = 40) -> tuple[Tensor, Tensor]:
    language = torch.randint(0, 6, (n,), generator=gen)
    return (language[:, None] * 4 + torch.randint(0, 9, (n, 7), generator=gen)) % 27, language


def fit(model: nn.Module, steps: int) -> float:
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    gen = torch.Generator().manual_seed(3)
    for _ in range(steps):
        word, language = words(gen)
        loss: Tensor = criterion(model(word, probable=FAULT), language)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


torch.manual_seed(1)
print("loss", fit(Languages(), 80))
