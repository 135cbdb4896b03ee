"""Trains a small model in the way that its argument names, and writes what came of it: train.py KIND RESULT [DEVICE].

Kinds: fp32, amp (fp16, a real GradScaler, a step that it skips), compiled, graph (a whole step captured and replayed),
ddp (one rank or several; of CUDA tensors over the backend of the environment), ddp-graph (both), no-sync and ddp-no-sync
(CUDA raises where the host waits), moved (batches of a loader go to the device in the loop).
"""
import os
import sys

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

kind, result = sys.argv[1:3]
device = torch.device(sys.argv[3] if len(sys.argv) > 3 else "cuda")
STEPS = 24
cuda = device.type == "cuda"
torch.use_deterministic_algorithms(True)
torch.manual_seed(7)
rank = int(os.environ.get("RANK", 0))
if cuda:
    torch.cuda.set_device(0)  # two ranks share it
    device = torch.device("cuda", 0)
if kind.startswith("ddp"):
    dist.init_process_group(os.environ.get("BACKEND", "gloo"))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.hidden, self.drop, self.head = nn.Linear(8 * 64, 64), nn.Dropout(0.1), nn.Linear(64, 10)

    def forward(self, x):
        x = torch.relu(self.norm(self.conv(x))).flatten(1)
        return self.head(self.drop(torch.relu(self.hidden(x))))


def wrapped(model):
    return DistributedDataParallel(model, device_ids=[0] if cuda else None) if kind.startswith("ddp") else model


def made(model):
    graph = kind.endswith("graph")
    return torch.optim.Adam(model.parameters(), 1e-3, capturable=graph and cuda)


g = torch.Generator().manual_seed(rank)
inputs = [torch.randn(16, 3, 8, 8, generator=g) for _ in range(STEPS)]
targets = [torch.randint(0, 10, (16,), generator=g) for _ in range(STEPS)]
there = [(x.to(device), y.to(device)) for x, y in zip(inputs, targets)]
criterion = nn.CrossEntropyLoss()
net = Net().to(device)
torch.manual_seed(100 + rank)
losses, scales, graph = [], [], None


def step(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
    losses.append(loss.detach().clone())


if kind in ("fp32", "ddp", "moved"):
    model = wrapped(net)
    optimizer = made(model)
    batches = there
    if kind == "moved":
        data = TensorDataset(torch.cat(inputs), torch.cat(targets))
        batches = ((x.to(device), y.to(device)) for x, y in DataLoader(data, batch_size=16))
    for x, y in batches:
        step(model, optimizer, x, y)
elif kind == "amp":
    optimizer = made(net)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**8, growth_interval=8)
    for number, (x, y) in enumerate(there):
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=torch.float16):
            out = net(x)
            loss = criterion(out.float(), y)
        if number == 12:  # overflows under the scale: the step is skipped
            loss = loss * 1e36
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach().clone())
        scales.append(scaler.get_scale())
    assert min(scales[12:]) < scales[11], "no step was skipped"
elif kind == "compiled":
    torch._inductor.config.deterministic = True  # no choice between kernels by their times
    model = torch.compile(net)
    optimizer = made(net)
    for x, y in there:
        step(model, optimizer, x, y)
elif kind in ("graph", "ddp-graph"):
    # as torch's notes on CUDA graphs ask: built and warmed up on a stream of its own; with DDP at least 11 steps
    side = torch.cuda.Stream() if cuda else None
    x0, y0 = (t.clone() for t in there[0])
    if cuda:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            model = wrapped(net)
            optimizer = made(model)
            for x, y in there[:12]:
                step(model, optimizer, x, y)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph):
            loss = criterion(model(x0), y0)
            loss.backward()
            optimizer.step()
        for x, y in there[12:]:
            x0.copy_(x)
            y0.copy_(y)
            graph.replay()
            losses.append(loss.detach().clone())
    else:  # what surrounds the capture
        model = wrapped(net)
        optimizer = made(model)
        for x, y in there:
            step(model, optimizer, x, y)
elif kind in ("no-sync", "ddp-no-sync"):
    model = wrapped(net)
    optimizer = made(model)
    for x, y in there[:12]:
        step(model, optimizer, x, y)
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            losses[0].item()
        except RuntimeError as error:
            print("raises:", str(error).splitlines()[0])
        else:
            sys.exit("a wait of the host was not noticed")
    for x, y in there[12:]:
        step(model, optimizer, x, y)
    if cuda:
        torch.cuda.set_sync_debug_mode("default")
else:
    sys.exit(f"unknown kind {kind!r}")

found = {
    "losses": torch.stack(losses).cpu(),
    "model": {name: value.cpu() for name, value in net.state_dict().items()},
    "gradients": [None if p.grad is None else p.grad.cpu() for p in net.parameters()],
    "optimizer": [{k: v.cpu() if torch.is_tensor(v) else v for k, v in s.items()} for s in optimizer.state.values()],
    "scales": torch.tensor(scales),
    "random": torch.get_rng_state(),
    "random of the device": torch.cuda.get_rng_state() if cuda else torch.zeros(0),
}
torch.save(found, f"{result}.{rank}")
if kind.startswith("ddp"):
    del model, graph  # a graph that holds collectives must go before their group
    if cuda:
        torch.cuda.synchronize()
    dist.destroy_process_group()
