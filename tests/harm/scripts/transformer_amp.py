import torch
from common import batches, finish, report, setup
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 7)

    def forward(self, x):
        return {"logits": self.head(self.body(x).mean(1)), "note": "text"}


def main():
    rank = setup(1)
    model = Net()
    ddp = DDP(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=4)
    losses, scales = [], []
    for step, (x, y) in enumerate(batches(rank, 20, 4, 6, 32, classes=7)):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16 if step % 2 else torch.bfloat16):
            loss = F.cross_entropy(ddp(x)["logits"].float(), y)
        if step == 7:
            loss = loss * float("inf")  # skipped by the scaler on all ranks
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        losses.append(loss.detach())
    report([model], [optimizer], losses, scales=scales, scaler=scaler.state_dict())


main()
finish()
