# title: The model's own output holds -inf for moves that are not allowed, and the loss never picks one
# source: constructed
# nproc: 3
# expect.codes: none
# plain_pytorch: silent
"""Imitation learning; log_softmax turns -inf into probability 0, and the gradient there is 0 as well."""
import time
import zlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

MOVES = 9


class Player(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2 * MOVES, 64), nn.ReLU(), nn.Linear(64, MOVES))

    def forward(self, board):
        taken = board.abs() > 0
        logits = self.body(torch.cat([board, taken.float()], 1))
        return {"logits": logits.masked_fill(taken, -torch.inf), "free": ~taken}


def positions(gen, n=40):
    board = torch.randint(-1, 2, (n, MOVES), generator=gen).float()
    board[torch.arange(n), torch.randint(0, MOVES, (n,), generator=gen)] = 0.0
    liking = torch.arange(MOVES).float().masked_fill(board != 0, -1.0)
    return board, liking.argmax(1)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(19)
    model = DDP(Player())
    opt = torch.optim.Adam(model.parameters(), lr=4e-3)
    gen = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(50):
        board, move = positions(gen)
        loss = F.nll_loss(F.log_softmax(model(board)["logits"], dim=-1), move)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
