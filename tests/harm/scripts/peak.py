"""Training loops that let their batches go: what stays alive of each, exactly, and the largest resident set of each.

    python peak.py [--mib 24] [NAME...]

Prints one JSON object a situation: "alive" is the most bytes of batches, outputs and gradients that existed although
the script had let them go, "peak" the resident set in MiB, and "objects" how many tensor objects are left at the end.
"""

import argparse
import ctypes
import json
import weakref

import torch
from common import finish, setup
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset

WIDTH = 64
_M_MMAP_THRESHOLD = -3
# The C library would keep what is freed, more or less of it by chance; what is this large goes back at once.
ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 18)


class Book:
    """Follows memory by weak references to it."""

    def __init__(self):
        self.refs, self.objects, self.alive = [], [], 0

    def made(self, *tensors):
        self.objects += [weakref.ref(t) for t in tensors]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
        self.refs += [(s._weak_ref(), s.nbytes()) for s in storages.values()]

    def gone(self):
        """Everything that was made should be gone by now."""
        self.alive = max(self.alive, sum(n for ref, n in self.refs if not torch.UntypedStorage._expired(ref)))

    def objects_alive(self):
        return sum(ref() is not None for ref in self.objects)


def rows(mib):
    return int(mib * (1 << 20)) // (4 * WIDTH)


def make(mib):
    return torch.full((rows(mib), WIDTH), 0.5)


def small(**options):
    model = DDP(nn.Linear(WIDTH, 2), **options)
    return model, torch.optim.SGD(model.parameters(), lr=1e-3)


def step(optimizer):
    optimizer.step()
    optimizer.zero_grad()


def train(model, optimizer, sizes, book, steps=3, scaler=None):
    for _ in range(steps):
        for size in sizes:
            x = make(size)
            book.made(x)
            loss = model(x)[:4].pow(2).mean() / len(sizes)
            (loss if scaler is None else scaler.scale(loss)).backward()
            del x, loss
            book.gone()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()


def accumulation(book, mib):
    train(*small(), [mib] * 8, book)


def uneven(book, mib):
    train(*small(), [mib, 1, mib // 2, 1, mib], book)


def one_huge(book, mib):
    train(*small(), [6 * mib], book, steps=4)


def scaler(book, mib):
    train(*small(), [mib] * 4, book, scaler=torch.amp.GradScaler("cpu", init_scale=4.0))


def token_ids(book, mib):
    """Batches that stay below the bound are kept, within it."""
    train(*small(), [1] * 20, book)


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 2)

    def forward(self, batch, *, more):
        return self.first(batch["a"])[:4] + self.second(more[0])[:4]


def dictionaries(book, mib):
    model = DDP(Named())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(3):
        for _ in range(4):
            batch, more = {"a": make(mib / 2)}, [make(mib / 2)]
            book.made(batch["a"], more[0])
            loss = model(batch, more=more).sum()
            loss.backward()
            del batch, more, loss
            book.gone()
        step(optimizer)


def views(book, mib):
    """A small part of something huge keeps all of it."""
    model, optimizer = small()
    for _ in range(3):
        for _ in range(4):
            whole = make(mib)
            book.made(whole)
            x = whole[8:16]
            loss = model(x).sum()
            loss.backward()
            del whole, x, loss
            book.gone()
        step(optimizer)


class Batches(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, i):
        return torch.full((rows(0.5), WIDTH), float(i))


def worker(book, mib):
    """What a worker sends lies in shared memory and holds a file descriptor."""
    model, optimizer = small()
    for number, x in enumerate(DataLoader(Batches(), batch_size=2, num_workers=1)):
        book.made(x)
        loss = model(x)[:4].sum()
        loss.backward()
        del x, loss
        book.gone()
        if number % 4 == 3:
            step(optimizer)


def losses_kept(book, mib):
    """Losses that keep their graph after backward keep what is in it, and no batch."""
    model, optimizer = small()
    losses = []
    for _ in range(6):
        x = make(mib)
        book.made(x)
        loss = model(x)[:4].pow(2).mean().sqrt()
        losses.append(loss)
        loss.backward()
        del x, loss
        step(optimizer)
        book.gone()


def evaluation(book, mib):
    """Evaluations with and without gradients; no step follows."""
    model, optimizer = small()
    train(model, optimizer, [1], Book())
    for number in range(8):
        with torch.set_grad_enabled(number % 2 == 0):
            x = make(mib)
            output = model(x).repeat(1, WIDTH)
            book.made(x, output)
            del x, output
        book.gone()


def many(book, mib):
    pairs = [small() for _ in range(6)]
    for _ in range(2):
        for model, optimizer in pairs:
            train(model, optimizer, [mib], book, steps=1)


def clipped(book, mib):
    """Gradients that were changed between their reduction and the step."""
    model = DDP(nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(12):
        model(torch.ones(4, 1024)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        book.made(*(p.grad for p in model.parameters()))
        step(optimizer)
        book.gone()


def raw(book, mib):
    """No DDP, and a model from another model's output."""
    body, head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=1e-3)
    for _ in range(3):
        for _ in range(3):
            h = body(make(mib))
            loss = head(h)[:4].sum()
            book.made(h)
            loss.backward()
            del h, loss
            book.gone()
        step(optimizer)


SITUATIONS = [
    accumulation, uneven, one_huge, scaler, token_ids, dictionaries, views, worker, losses_kept, evaluation, many,
    clipped, raw,
]  # fmt: skip


def status(name):
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) // 1024 for line in file if line.startswith(name))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=24)
    parser.add_argument("names", nargs="*")
    args = parser.parse_args()
    setup()
    for situation in SITUATIONS:
        if args.names and situation.__name__ not in args.names:
            continue
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")  # the peak begins anew
        book = Book()
        situation(book, args.mib)
        found = {"alive": book.alive, "peak": status("VmHWM"), "objects": book.objects_alive()}
        print(json.dumps({"name": situation.__name__, **found}), flush=True)


if __name__ == "__main__":
    main()
    finish()
