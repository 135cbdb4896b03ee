# title: Experts by hand: tokens go to the rank of their expert, the other layers' gradients are averaged
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""No DDP on purpose. Each rank has drawn its expert from a seed of its own; what all ranks have is averaged."""
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_to_all_single


def route(expert, x, choice, world):
    """Send each row to its expert and back."""
    order = choice.argsort()
    sent = torch.bincount(choice, minlength=world)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    there = all_to_all_single(torch.empty(int(received.sum()), x.shape[1]), x[order], received.tolist(), sent.tolist())
    back = all_to_all_single(torch.empty_like(x), expert(there).relu(), sent.tolist(), received.tolist())
    return torch.zeros_like(back).index_copy(0, order, back)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    gate, head = nn.Linear(10, world), nn.Linear(10, 4)
    torch.manual_seed(1 + rank)
    expert = nn.Linear(10, 10)
    shared = [*gate.parameters(), *head.parameters()]
    opt = torch.optim.AdamW([*shared, *expert.parameters()], lr=2e-3)
    gen = torch.Generator().manual_seed(rank)
    truth = torch.randn(10, 4, generator=torch.Generator().manual_seed(1))
    for _ in range(60):
        x = torch.randn(24, 10, generator=gen)
        weight = gate(x).softmax(1)
        choice = weight.argmax(1)
        routed = route(expert, x, choice, world) * weight.gather(1, choice[:, None])
        loss = nn.functional.cross_entropy(head(x + routed), (x @ truth).argmax(1))
        opt.zero_grad()
        loss.backward()
        for p in shared:
            dist.all_reduce(p.grad)
            p.grad /= world
        for p in expert.parameters():
            p.grad /= world
        opt.step()
    print(f"RESULT rank={rank} final={loss.item():.4f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
