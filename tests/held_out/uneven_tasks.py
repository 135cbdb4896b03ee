# title: Two tasks in turn, of which each uses a part of the net, with unused parameters allowed
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""Nested dicts as batches; a sum of words on even steps and a picture on odd ones."""
import torch
import torch.distributed as dist
from torch import nn


class TwoTasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.readers = nn.ModuleDict({"words": nn.EmbeddingBag(30, 24), "picture": nn.Linear(16, 24)})
        self.shared = nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 24), nn.SiLU())
        self.writers = nn.ModuleDict({"words": nn.Linear(24, 2), "picture": nn.Linear(24, 3)})

    def forward(self, batch):
        task = batch["meta"]["task"]
        return self.writers[task](self.shared(self.readers[task](batch["input"]["value"])))


def get(task, gen):
    if task == "words":
        value = torch.randint(30, (32, 6), generator=gen)
        answer = (value.sum(1) > 87).long()
    else:
        value = torch.randn(32, 16, generator=gen)
        answer = value[:, :3].argmax(1)
    return {"meta": {"task": task, "names": ["x"] * 32}, "input": {"value": value}, "answer": answer}


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(4)
model = nn.parallel.DistributedDataParallel(TwoTasks(), find_unused_parameters=True)
optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
criterion = nn.CrossEntropyLoss()
gen = torch.Generator().manual_seed(rank)
losses = {"words": [], "picture": []}
for step in range(100):
    task = ("words", "picture")[step % 2]
    batch = get(task, gen)
    optimizer.zero_grad()
    loss = criterion(model(batch), batch["answer"])
    loss.backward()
    optimizer.step()
    losses[task].append(loss.item())
print(rank, {k: round(sum(v[-5:]) / 5, 3) for k, v in losses.items()}, flush=True)
dist.barrier()
dist.destroy_process_group()
