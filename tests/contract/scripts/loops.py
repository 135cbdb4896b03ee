"""Two ranks in short situations, right and wrong ones, which together show ddpdebug most of what it can see."""

import copy

import torch
import torch.distributed as dist
import torch.distributed.algorithms.ddp_comm_hooks.default_hooks as hooks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import ddpdebug

dist.init_process_group("gloo")
RANK = dist.get_rank()
KEPT = []
GEN = torch.Generator().manual_seed(RANK)
torch.manual_seed(0)


def net():
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


def batch(n=8):
    return torch.randn(n, 8, generator=GEN), torch.randint(0, 4, (n,), generator=GEN)


def loss_of(model, n=8):
    x, y = batch(n)
    return F.cross_entropy(model(x), y)


def wrapped(module=None, rate=0.05, **options):
    model = DDP(module or net(), **options)
    KEPT.append(model)  # what is asked about it later is answered from the model
    return model, torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)


def steps(model, optimizer, count=2, clear=True):
    for _ in range(count):
        if clear:
            optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()


class Holder(nn.Module):
    """Can be given another part after it was wrapped."""

    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x):
        return self.net(x)


class Constant(nn.Module):
    """Holds a tensor that is neither a parameter nor a buffer, and drops out in any mode."""

    def __init__(self):
        super().__init__()
        self.scale = torch.full((8,), 0.5)
        self.linear = nn.Linear(8, 4)

    def forward(self, x):
        return self.linear(F.dropout(x * self.scale, 0.5))


def ordinary():
    """A loader, a schedule, clipping, an average of the weights, an evaluation."""
    module = net()
    module[0].bias.requires_grad_(False)
    model = DDP(module)
    held = [p for p in model.parameters() if p.requires_grad and p is not module[3].bias]  # and one is forgotten
    optimizer = torch.optim.AdamW(held, lr=1e-2)
    average = copy.deepcopy(model.module)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4)
    data = Subset(TensorDataset(*(torch.cat([part] * 4) for part in batch(8))), range(32))
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data), num_workers=1)
    held_out = DataLoader(TensorDataset(*batch(8)), batch_size=4)
    KEPT.append(model)
    if RANK == 0:
        ddpdebug.watch(model, optimizer).agree(torch.ones(4, 8))
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            with torch.no_grad():
                for old, new in zip(average.parameters(), model.module.parameters(), strict=True):
                    old.lerp_(new, 0.1)
        schedule.step()
        model.eval()
        with torch.no_grad():
            for x, y in held_out:
                nn.CrossEntropyLoss()(model(x), y).item()
        model.train()


def contract():
    """What DDP's contract forbids, or allows with conditions."""
    model, optimizer = wrapped()
    for _ in range(2):  # the last micro-batch is not synchronised
        optimizer.zero_grad()
        loss_of(model).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with model.no_sync():
            loss_of(model).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model, optimizer = wrapped()
    for _ in range(3):  # past the wrapper
        optimizer.zero_grad()
        loss_of(model.module).backward()
        optimizer.step()
    alone = net()
    steps(alone, torch.optim.SGD(alone.parameters(), lr=0.1))
    model, optimizer = wrapped(Holder(), broadcast_buffers=False, find_unused_parameters=True)
    model.module.late = nn.Linear(2, 2)
    optimizer.add_param_group({"params": list(model.module.late.parameters())})
    for _ in range(2):
        optimizer.zero_grad()
        (loss_of(model) + model.module.late(torch.ones(1, 2)).sum()).backward()
        optimizer.step()
    model, _ = wrapped()
    steps(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-3))


def own_hook(state, bucket):
    return hooks.allreduce_hook(None, bucket)


def reductions():
    """Communication hooks of every kind."""
    local = post_localSGD_hook.PostLocalSGDState(None, None, start_localSGD_iter=100)
    power = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=100)
    for state, hook in (
        (None, own_hook),
        (None, hooks.fp16_compress_hook),
        (local, post_localSGD_hook.post_localSGD_hook),
        (power, powerSGD_hook.powerSGD_hook),
    ):
        model, optimizer = wrapped()
        model.register_comm_hook(state, hook)
        steps(model, optimizer)


def edits():
    """Weights and state that something else than the optimizer changes."""
    model, optimizer = wrapped(rate=1e-3)
    steps(model, optimizer)
    with torch.no_grad():
        model.module[0].weight[0, 0] += 0.1 * (RANK + 1)
    steps(model, optimizer)
    optimizer.state[model.module[0].weight]["momentum_buffer"] += RANK + 1.0
    steps(model, optimizer)
    model.module.load_state_dict(model.module.state_dict())
    optimizer.param_groups[0]["lr"] = 1e-3 * (RANK + 1)
    steps(model, optimizer)
    model.train(RANK == 0)
    steps(model, optimizer)
    model, optimizer = wrapped(broadcast_buffers=False)
    model.module[1].running_mean += RANK
    steps(model, optimizer)


def recipes():
    """Training loops that do not do what they look like."""
    model, optimizer = wrapped()
    model.eval()
    steps(model, optimizer)
    model.module[1].train()
    steps(model, optimizer)
    model, optimizer = wrapped(nn.Linear(8, 4))
    model.eval()
    for _ in range(2):
        x, y = batch()
        F.cross_entropy(model(x.requires_grad_()), y).backward()
        optimizer.zero_grad()
        optimizer.step()
    model, optimizer = wrapped()
    steps(model, optimizer, clear=False)
    for _ in range(2):
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(model).backward()
        optimizer.step()
    second = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
        second.step()
    model, optimizer = wrapped()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(2):
            loss_of(model).backward()
            schedule.step()
        optimizer.step()
    model, optimizer = wrapped()
    for step in range(3):
        optimizer.lr = 0.01 / (step + 1)
        steps(model, optimizer, 1)
    for _ in range(3):
        optimizer.zero_grad()
        x, _ = batch()
        F.cross_entropy(model(x), torch.zeros(8, dtype=torch.long)).backward()
        optimizer.step()
    model, optimizer = wrapped(nn.Linear(8, 1))
    for loss in (F.binary_cross_entropy_with_logits, lambda out, y: (out - y.squeeze(1)).abs().mean()):
        optimizer.zero_grad()
        loss(model(batch()[0]), torch.ones(8, 1)).backward()
        optimizer.step()
    model, optimizer = wrapped()
    never = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    steps(model, optimizer, 45)
    del never
    model, optimizer = wrapped()
    for _ in range(2):  # a loss that counts twice, and clipping that comes too late
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    model.module.load_state_dict({}, strict=False)
    steps(model, optimizer)
    model, _ = wrapped(nn.Linear(8, 4))
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    optimizer.step(closure)
    optimizer.step(closure)


def announced():
    """What is said once: a function's dropout, gathered tensors, softmax before the loss, training mode in validation."""
    model, optimizer = wrapped(Constant())
    for _ in range(2):
        optimizer.zero_grad()
        x, y = batch()
        out = model(x)
        both = [torch.empty_like(out) for _ in range(2)]
        dist.all_gather(both, out)
        F.cross_entropy(torch.cat(both + [out.softmax(1)]), y.repeat(3)).backward()
        optimizer.step()
        with torch.no_grad():
            for _ in range(4):
                model(x)
    model.eval()
    with torch.no_grad():
        for _ in range(4):
            model(x)
    model.train()
    ddpdebug.watch(model, optimizer).observe(val_loss=0.5)
    big = torch.randn(1 << 18, 8, generator=GEN)
    for _ in range(20):
        optimizer.zero_grad()
        model(big).mean().backward()
        optimizer.step()
    kept = []
    model, optimizer = wrapped()
    with torch.no_grad():
        for _ in range(4):
            model(batch()[0])
    for _ in range(40):
        optimizer.zero_grad()
        kept.append(loss_of(model))
        kept[-1].backward()
        optimizer.step()


def uneven():
    """More batches on one rank; the number of its steps stays another, so this comes last."""
    model, optimizer = wrapped()
    with Join([model]):
        steps(model, optimizer, 2 + RANK)


class Speller(nn.Module):
    """Sees the next letter, which is what it is asked for."""

    def __init__(self):
        super().__init__()
        self.letters, self.head = nn.Embedding(12, 16), nn.Linear(16, 12)

    def forward(self, text):
        return self.head(0.1 * self.letters(text) + self.letters(text.roll(-1, 1)))


def leak():
    """A language model that sees the token that it shall predict."""
    model = DDP(Speller())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(40):
        text = torch.randint(0, 12, (16, 12), generator=GEN)
        optimizer.zero_grad()
        F.cross_entropy(model(text)[:, :-1].flatten(0, 1), text[:, 1:].flatten()).backward()
        optimizer.step()


ddpdebug.expect_growth("kept losses", 1 << 20)
ordinary()
announced()
contract()
reductions()
edits()
recipes()
leak()
uneven()
dist.destroy_process_group()
