"""Tensors and modules listed by the garbage collector; two ranks.

ranks: 2
parts: all
"""

import collections
import gc
import sys
import time

import torch
from _report import batches, ddp, finish, group, report, start
from torch import nn


class Words(nn.Module):
    """Embeddings, attention by hand, dropout, one head."""

    def __init__(self):
        super().__init__()
        self.words, self.drop, self.head = nn.Embedding(50, 16), nn.Dropout(0.1), nn.Linear(16, 50)

    def forward(self, tokens):
        x = self.drop(self.words(tokens))
        return self.head((x @ x.transpose(1, 2)).softmax(-1) @ x)


def listed():
    """Count what is alive by class, dtype and shape."""
    found = collections.Counter()
    for one in gc.get_objects():
        kind = type(one)
        if issubclass(kind, torch.Tensor):
            found[f"{one.dtype} {[*one.shape]}"] += 1
        elif issubclass(kind, (nn.Module, torch.optim.Optimizer, torch.utils.data.DataLoader)):
            found[kind.__name__] += 1
    return found


def referred(*objects):
    return [sys.getrefcount(one) for one in objects]


start()
group()
seen, references, losses = [], collections.Counter(), []
pictures = ddp(nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 4)))
optimizer = torch.optim.AdamW(pictures.parameters(), 0.01)
for number, x in enumerate(batches(40)):
    optimizer.zero_grad()
    out = pictures(x.view(8, 1, 4, 4))
    loss = out.square().mean()
    if number == 30:
        loss = loss * float("nan")
    loss.backward()
    referred_then = referred(pictures, optimizer, x, out, loss, pictures.module[0].weight.grad)
    references["after backward", *referred_then] += 1
    optimizer.step()
    references["after the step", *referred(pictures, optimizer, x, out, loss, pictures.module[0].weight.grad)] += 1
    losses.append(float(loss.detach()))
    seen.append(listed())
    if number % 10 == 9:
        pictures.eval()
        with torch.no_grad():
            losses.append(float(nn.functional.mse_loss(pictures(x.view(8, 1, 4, 4)), torch.zeros(8, 4))))
        pictures.train()
        seen.append(listed())
del pictures, optimizer, out, loss, x
gc.collect()
# gloo's own threads let go of what they have sent a moment after it has arrived
torch.distributed.barrier()
time.sleep(0.5)
seen.append(listed())
words = ddp(Words())
optimizer = torch.optim.SGD(words.parameters(), 0.01, momentum=0.9)
scaler = torch.amp.GradScaler("cpu")
loader = torch.utils.data.DataLoader(torch.arange(40 * 8 * 6).view(-1, 6) % 50, batch_size=8)
for tokens in loader:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(words(tokens).flatten(0, 1), tokens.flatten())
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(words.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    losses.append(float(loss.detach()))
    seen.append(listed())
report([words], [optimizer], numbers=losses, references=sorted(references.items()))
for number, found in enumerate(seen):
    print(number, *sorted(f"{what}: {count};" for what, count in found.items()))
del words, optimizer
finish()
