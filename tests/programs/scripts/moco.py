r"""Contrastive learning with a momentum encoder, a queue of keys and batch normalisation shuffled over the ranks.

manner = "facebookresearch/moco, main_moco.py"
ranks = 2

[[fault]]
name = "the key encoder is left trainable, although its forward has no graph"
old = "            param_k.requires_grad = False\n"
new = ""
codes = ["FAIL1001", "SYNC207"]
"""
import torch
import torch.distributed as dist
from _report import finish, report
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


def encoder(dim):
    body = [nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1, bias=False)]
    body += [nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*body, nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, dim))


@torch.no_grad()
def concat_all_gather(tensor):
    gathered = [torch.ones_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor)
    return torch.cat(gathered, dim=0)


class MoCo(nn.Module):
    def __init__(self, dim=16, K=128, m=0.99, T=0.2):
        super().__init__()
        self.K, self.m, self.T = K, m, T
        self.encoder_q, self.encoder_k = encoder(dim), encoder(dim)
        for param_q, param_k in zip(self.encoder_q.parameters(), self.encoder_k.parameters()):
            param_k.data.copy_(param_q.data)
            param_k.requires_grad = False
        self.register_buffer("queue", nn.functional.normalize(torch.randn(dim, K), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _momentum_update_key_encoder(self):
        for param_q, param_k in zip(self.encoder_q.parameters(), self.encoder_k.parameters()):
            param_k.data = param_k.data * self.m + param_q.data * (1.0 - self.m)

    @torch.no_grad()
    def _dequeue_and_enqueue(self, keys):
        keys = concat_all_gather(keys)
        ptr = int(self.queue_ptr)
        self.queue[:, ptr : ptr + keys.shape[0]] = keys.T
        self.queue_ptr[0] = (ptr + keys.shape[0]) % self.K

    @torch.no_grad()
    def _batch_shuffle_ddp(self, x):
        this, x_gather = x.shape[0], concat_all_gather(x)
        idx_shuffle = torch.randperm(x_gather.shape[0])
        dist.broadcast(idx_shuffle, src=0)
        idx_this = idx_shuffle.view(-1, this)[dist.get_rank()]
        return x_gather[idx_this], torch.argsort(idx_shuffle)

    @torch.no_grad()
    def _batch_unshuffle_ddp(self, x, idx_unshuffle):
        return concat_all_gather(x)[idx_unshuffle.view(-1, x.shape[0])[dist.get_rank()]]

    def forward(self, im_q, im_k):
        q = nn.functional.normalize(self.encoder_q(im_q), dim=1)
        with torch.no_grad():
            self._momentum_update_key_encoder()
            im_k, idx_unshuffle = self._batch_shuffle_ddp(im_k)
            k = nn.functional.normalize(self.encoder_k(im_k), dim=1)
            k = self._batch_unshuffle_ddp(k, idx_unshuffle)
        l_pos = torch.einsum("nc,nc->n", [q, k]).unsqueeze(-1)
        l_neg = torch.einsum("nc,ck->nk", [q, self.queue.clone().detach()])
        logits = torch.cat([l_pos, l_neg], dim=1) / self.T
        self._dequeue_and_enqueue(k)
        return logits, torch.zeros(logits.shape[0], dtype=torch.long)


class TwoCrops(Dataset):
    """Two noisy, shifted and mirrored views of each picture."""

    def __init__(self, count):
        coarse = torch.randn(count, 3, 4, 4, generator=torch.Generator().manual_seed(81))
        self.images = nn.functional.interpolate(coarse, size=16)

    def __len__(self):
        return len(self.images)

    def view(self, x):
        x = x.roll(tuple(torch.randint(-2, 3, (2,)).tolist()), (1, 2))
        return (x.flip(2) if torch.rand(1) < 0.5 else x) + 0.1 * torch.randn_like(x)

    def __getitem__(self, index):
        return self.view(self.images[index]), self.view(self.images[index])


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = MoCo()
    model = nn.parallel.DistributedDataParallel(model)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.06, momentum=0.9, weight_decay=1e-4)
    dataset = TwoCrops(320)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler, drop_last=True)
    losses = []
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for param_group in optimizer.param_groups:
            param_group["lr"] = 0.06 * (0.1 if epoch >= 3 else 1.0)
        model.train()
        for i, (im_q, im_k) in enumerate(loader):
            output, target = model(im_q, im_k)
            loss = criterion(output, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        print(f"Epoch {epoch} loss {loss.item():.4f} acc {(output.argmax(1) == target).float().mean():.3f}")
    report([model.module], [optimizer], losses)


if __name__ == "__main__":
    main()
    finish()
