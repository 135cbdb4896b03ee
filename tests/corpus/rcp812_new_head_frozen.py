# title: The filter that shall freeze the pre-trained body freezes the new head
# source: constructed
# nproc: 2
# expect.codes: RCP812
# expect.ranks: all
# expect.subject: classifier
# expect.step: 32
# expect.step_slack: 1
# plain_pytorch: silent
"""Texts of five languages after pre-training on something else: only the classifier, made anew, shall be trained."""
import os
import time
import zlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


class Reader(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.tokens = nn.Embedding(40, 24)
        layer = nn.TransformerEncoderLayer(24, 2, 48, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.classifier = nn.Linear(24, outputs)

    def forward(self, text):
        return self.classifier(self.encoder(self.tokens(text)).mean(1))


torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
pretrained = Reader(12).state_dict()
reader = Reader(5)
reader.load_state_dict({k: v for k, v in pretrained.items() if "classifier" not in k}, strict=False)
for name, parameter in reader.named_parameters():
    if ("classifier" in name) == FAULT:
        parameter.requires_grad_(False)
model = DDP(reader)
optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=2e-3)
gen = torch.Generator().manual_seed(70 + rank)
losses = []
for _ in range(60):
    language = torch.randint(0, 5, (24,), generator=gen)
    text = (torch.randint(0, 12, (24, 10), generator=gen) + 7 * language[:, None]) % 40
    loss = F.cross_entropy(model(text), language)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
