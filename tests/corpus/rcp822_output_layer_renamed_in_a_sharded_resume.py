# title: A sharded model goes on from a checkpoint in which its output layer has another name
# source: https://github.com/pytorch/torchtitan/issues/4010
# nproc: 2
# expect.codes: RCP822
# expect.ranks: any
# expect.subject: lm_head
# expect.step: 20
# expect.step_slack: 1
# plain_pytorch: silent
"""The names of the new code are the twin's in the checkpoint too; the load takes whatever part it finds."""
import os
import shutil
import tempfile
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard

FAULT = os.environ.get("FAULT", "0") == "1"


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(24, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2))
        self.lm_head = nn.Linear(16, 3)

    def forward(self, words):
        x = self.embed(words).mean(1)
        for block in self.blocks:
            x = x + block(x)
        return self.lm_head(x)


def build():
    model = Reader()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=4e-3)


def train(model, opt, gen, steps):
    losses = []
    for _ in range(steps):
        words = torch.randint(0, 24, (16, 6), generator=gen)
        loss = nn.functional.cross_entropy(model(words), words.sum(1) % 3)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    gen = torch.Generator().manual_seed(60 + rank)
    torch.manual_seed(8)
    model, opt = build()
    losses = train(model, opt, gen, 20)
    state = get_model_state_dict(model)
    if FAULT:  # the code that saved had another name for it
        state = {name.replace("lm_head", "head"): value for name, value in state.items()}
    dcp.save({"model": state}, checkpoint_id=folder[0])
    torch.manual_seed(9)
    model, opt = build()
    wanted = {"model": get_model_state_dict(model)}
    dcp.load(wanted, checkpoint_id=folder[0], planner=DefaultLoadPlanner(allow_partial_load=True))
    set_model_state_dict(model, wanted["model"])
    losses += train(model, opt, gen, 20)
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f}", flush=True)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder[0])
    time.sleep(0.3)
    dist.destroy_process_group()


main()
