"""DataLoader workers by spawn: classes of __main__ are found.

run: alone
"""

import torch
from _report import report, start, train
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, i):
        return torch.full((16,), i / 32)


if __name__ == "__main__":
    start()
    model = nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    loader = DataLoader(Rows(), 8, shuffle=True, num_workers=1, multiprocessing_context="spawn")
    losses = train(model, optimizer, loader)
    report([model], [optimizer], losses, name=__name__)
