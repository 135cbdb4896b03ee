r"""A Trainer class with snapshots, mixed precision with a GradScaler, and an evaluation after every epoch.

manner = "pytorch/examples, minGPT-ddp; its split seeded, its evaluation in eval mode, its clipping after unscaling"
ranks = 2

[[fault]]
name = "gradients are clipped before they are unscaled, as published"
old = "            self.scaler.unscale_(self.optimizer)\n"
new = ""
codes = ["RCP813"]
where = "clip_grad_norm_("

[[fault]]
name = "the split is drawn without a seed, as published"
old = "random_split(dataset, [train_len, len(dataset) - train_len], torch.Generator().manual_seed(0))"
new = "random_split(dataset, [train_len, len(dataset) - train_len])"
codes = ["DATA910"]
"""
import os
from dataclasses import dataclass

import torch
from _report import finish, report
from torch import nn
from torch.distributed import init_process_group
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, random_split
from torch.utils.data.distributed import DistributedSampler


class CharDataset(Dataset):
    def __init__(self, block_size=24):
        follow = torch.randint(0, 28, (28, 2), generator=torch.Generator().manual_seed(21))
        text, c = [], 0
        for choice in torch.randint(0, 2, (1600,), generator=torch.Generator().manual_seed(22)).tolist():
            c = int(follow[c, choice])
            text.append(c)
        self.data, self.block_size = torch.tensor(text), block_size

    def __len__(self):
        return len(self.data) - self.block_size

    def __getitem__(self, idx):
        chunk = self.data[idx : idx + self.block_size + 1]
        return chunk[:-1], chunk[1:]


class Block(nn.Module):
    def __init__(self, n_embd, n_head, block_size):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.attn = nn.MultiheadAttention(n_embd, n_head, dropout=0.1, batch_first=True)
        self.register_buffer("mask", torch.triu(torch.ones(block_size, block_size), 1).bool())
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd), nn.Dropout(0.1))

    def forward(self, x):
        T = x.size(1)
        h = self.ln1(x)
        x = x + self.attn(h, h, h, attn_mask=self.mask[:T, :T], need_weights=False)[0]
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self, vocab=28, n_embd=32, block_size=24):
        super().__init__()
        self.tok_emb = nn.Embedding(vocab, n_embd)
        self.pos_emb = nn.Parameter(0.02 * torch.randn(1, block_size, n_embd))
        self.blocks = nn.Sequential(*(Block(n_embd, 2, block_size) for _ in range(2)))
        self.ln_f, self.head = nn.LayerNorm(n_embd), nn.Linear(n_embd, vocab, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, idx, targets):
        logits = self.head(self.ln_f(self.blocks(self.tok_emb(idx) + self.pos_emb)))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


@dataclass
class TrainerConfig:
    max_epochs: int = 2
    batch_size: int = 32
    grad_norm_clip: float = 1.0
    save_every: int = 1
    snapshot_path: str = "snapshot.pt"


class Trainer:
    def __init__(self, config, model, optimizer, train_dataset, test_dataset):
        self.config, self.optimizer = config, optimizer
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.train_loader = self._prepare(train_dataset)
        self.test_loader = self._prepare(test_dataset)
        self.scaler = torch.amp.GradScaler("cpu")
        self.losses = []
        self.model = DDP(model)

    def _prepare(self, dataset):
        return DataLoader(dataset, self.config.batch_size, shuffle=False, sampler=DistributedSampler(dataset))

    def _run_batch(self, source, targets, train=True):
        with torch.set_grad_enabled(train), torch.amp.autocast("cpu", dtype=torch.float16):
            _, loss = self.model(source, targets)
        if train:
            self.optimizer.zero_grad(set_to_none=True)
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_norm_clip)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.losses.append(loss.detach())
        return loss.item()

    def _run_epoch(self, epoch, loader, train=True):
        self.model.train(train)
        loader.sampler.set_epoch(epoch)
        for it, (source, targets) in enumerate(loader):
            loss = self._run_batch(source, targets, train)
            if it % 10 == 0:
                print(f"Epoch {epoch} | Iter {it} | {'Train' if train else 'Eval'} Loss {loss:.5f}")

    def train(self):
        for epoch in range(self.config.max_epochs):
            self._run_epoch(epoch, self.train_loader)
            if self.local_rank == 0 and epoch % self.config.save_every == 0:
                state = {"model": self.model.module.state_dict(), "optimizer": self.optimizer.state_dict(), "epoch": epoch}
                torch.save(state, self.config.snapshot_path)
            self._run_epoch(epoch, self.test_loader, train=False)


def main():
    init_process_group(backend="gloo")
    dataset = CharDataset()
    train_len = int(len(dataset) * 0.9)
    train_set, test_set = random_split(dataset, [train_len, len(dataset) - train_len], torch.Generator().manual_seed(0))
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    trainer = Trainer(TrainerConfig(), model, optimizer, train_set, test_set)
    torch.manual_seed(int(os.environ["RANK"]))
    trainer.train()
    report([model], [optimizer], trainer.losses)


if __name__ == "__main__":
    main()
    finish()
