import copy
import hashlib
import io
import pickle
import sys
from pathlib import Path

import torch
from common import batches, digest, finish, report, setup
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel


def saved(value):
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def main():
    rank = setup(11)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
    ddp = DDP(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    ema = copy.deepcopy(ddp.module).requires_grad_(False)
    swa = AveragedModel(model)
    losses = []
    for step, x in enumerate(batches(rank, 24, 8, 8)):
        loss = (ddp(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for a, b in zip(ema.parameters(), ddp.module.parameters()):
                a.lerp_(b, 0.1)
            losses.append((ema(x) - x).square().mean())
        swa.update_parameters(ddp.module)
        losses.append(loss.detach())
        if step in (0, 1, 2, 20):
            whole = saved({"m": ddp.module, "e": ema, "s": swa, "o": optimizer})
            assert b"ddpdebug" not in whole
            print("bytes", len(whole), hashlib.sha256(whole).hexdigest()[:16])
            again = copy.deepcopy({"m": ddp.module, "o": optimizer, "e": ema})
            print("copy", digest(again["m"].state_dict()), digest(again["e"].state_dict()))
            print("hooks", [len(m._forward_pre_hooks) for e in (again["m"], again["e"], swa) for m in e.modules()])
            print("pickled", len(pickle.dumps(copy.deepcopy(ema))))
    wrapped = pickle.loads(pickle.dumps(ddp))
    print("unpickled DDP", digest(wrapped.state_dict()))
    if rank == 0:
        torch.save({"m": ddp.module, "e": ema, "s": swa}, Path(sys.argv[1]) / "whole.pt")
    report([model, ema, swa], [optimizer], losses)


main()
finish()
