"""Model, DDP, optimizer, scheduler and loader are pickled and copied, and the copies train; 2 ranks.

ranks: 2
"""

import copy
import io
import pickle

import torch
from _report import batches, ddp, digest, finish, report, start, train
from torch import nn


class Trainer:
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(16, 8), nn.Dropout(0.1), nn.Linear(8, 4))
        self.ddp = ddp(self.model)
        self.optimizer = torch.optim.Adam(self.ddp.parameters(), 0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.loader = torch.utils.data.DataLoader(torch.randn(32, 16), 8, shuffle=True)
        self.ema = torch.optim.swa_utils.AveragedModel(self.model)
        self.losses = []

    def epoch(self):
        self.losses += train(self.ddp, self.optimizer, self.loader)
        self.scheduler.step()
        self.ema.update_parameters(self.model)


start()
trainer = Trainer()
trainer.epoch()
blob = pickle.dumps(trainer)
again = pickle.loads(blob)
again.epoch()
copied = copy.deepcopy(trainer.ddp)
optimizer = torch.optim.SGD(copied.parameters(), 0.01)
losses = train(copied, optimizer, batches(4))
buffer = io.BytesIO()
torch.save({"ddp": trainer.ddp, "optimizer": trainer.optimizer, "ema": trainer.ema.state_dict()}, buffer)
saved = buffer.getvalue()
loaded = torch.load(io.BytesIO(saved), weights_only=False)
losses += train(loaded["ddp"], loaded["optimizer"], batches(4))
trainer.epoch()
shared = copy.copy(trainer.model)
losses += train(shared, torch.optim.SGD(shared.parameters(), 0.01), batches(2))
sizes = len(blob), len(saved), digest(trainer.ema.state_dict()), sorted(vars(trainer.ddp)) == sorted(vars(copied))
report([trainer.model, again.model, copied, loaded["ddp"]], [trainer.optimizer], trainer.losses + again.losses + losses, sizes=sizes)
del trainer, again, copied, loaded, optimizer, shared
finish()
