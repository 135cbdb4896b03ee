"""The script has a folder of its own for temporary files, starts processes, and looks at what lies there."""
import multiprocessing
import os
import tempfile

os.makedirs("temporary", exist_ok=True)
os.environ["TMPDIR"] = os.path.abspath("temporary")
tempfile.tempdir = None

import numpy as np  # noqa: E402
import torch  # noqa: E402
from _report import report, start  # noqa: E402
from torch import nn  # noqa: E402


def work(queue):
    queue.put(sorted(os.listdir(tempfile.gettempdir())))


def main():
    start()
    np.random.set_bit_generator(np.random.PCG64(7))
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    seen, losses = [], []
    for step in range(6):
        if step == 3:
            queue = multiprocessing.get_context("fork").SimpleQueue()
            process = multiprocessing.get_context("fork").Process(target=work, args=(queue,))
            process.start()
            seen.append(queue.get())
            process.join()
        loss = model(torch.randn(3, 4) + np.random.rand()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss)
        seen.append(sorted(os.listdir(tempfile.gettempdir())))
    report([model], [optimizer], losses, seen=seen)


main()
