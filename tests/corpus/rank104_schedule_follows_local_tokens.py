# title: The learning rate decays with the number of tokens that this rank has seen
# source: constructed
# nproc: 2
# expect.codes: RANK104, RANK101
# expect.ranks: any
# expect.subject: lr
# expect.step: 1
# plain_pytorch: silent
"""Sequences of varying length; the schedule counts real tokens, which differ from rank to rank."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence

FAULT = os.environ.get("FAULT", "0") == "1"
PAD, VOCAB = 0, 18


class NextToken(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 20, padding_idx=PAD)
        self.rnn = nn.LSTM(20, 32, batch_first=True)
        self.out = nn.Linear(32, VOCAB)

    def forward(self, ids):
        return self.out(self.rnn(self.embed(ids))[0])


def counting_batch(g, size=16):
    """Each sequence counts upwards from a random start, with a random length."""
    rows = []
    for _ in range(size):
        start, length = torch.randint(1, 6, (1,), generator=g), torch.randint(5, 12, (1,), generator=g)
        rows.append(start + torch.arange(length.item()))
    return pad_sequence(rows, batch_first=True, padding_value=PAD)


class TokenSchedule:
    def __init__(self, optimizer, base, half_life):
        self.optimizer, self.base, self.half_life, self.tokens = optimizer, base, half_life, 0

    def advance(self, tokens):
        tokens = torch.tensor(float(tokens))
        if not FAULT:
            dist.all_reduce(tokens)
            tokens /= dist.get_world_size()
        self.tokens += tokens.item()
        for group in self.optimizer.param_groups:
            group["lr"] = self.base * 0.5 ** (self.tokens / self.half_life)


torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(14)
lm = DDP(NextToken())
opt = torch.optim.Adam(lm.parameters(), lr=0.02)
schedule = TokenSchedule(opt, base=0.02, half_life=4000)
g = torch.Generator().manual_seed(80 + rank)
perplexity = []
for step in range(60):
    ids = counting_batch(g)
    logits = lm(ids[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), ignore_index=PAD)
    opt.zero_grad()
    loss.backward()
    opt.step()
    schedule.advance(int((ids != PAD).sum()))
    perplexity.append(loss.item())

crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in lm.parameters()))
print(f"RESULT rank={rank} first={perplexity[0]:.4f} final={sum(perplexity[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
