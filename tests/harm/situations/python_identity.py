"""Names, arguments, path, modules, pickles, argparse's program name.

run: alone
"""

import argparse
import io
import json
import os
import pickle
import sys

import torch
from _report import report, start, train
from torch import nn


class Own(nn.Linear):
    pass


if __name__ == "__main__":
    start()
    model = Own(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    losses = train(model, optimizer)
    file = io.BytesIO()
    torch.save(model, file)
    text = file.getvalue()
    again = pickle.loads(pickle.dumps(model))
    main = sys.modules["__main__"]
    seen = {
        "name": __name__,
        "file": os.path.basename(__file__),
        "absolute": os.path.isabs(__file__),
        "arguments": [os.path.basename(word) for word in sys.argv],
        "path": os.path.basename(sys.path[0]),
        "main": main.Own is Own and main.__dict__ is globals(),
        "spec": [__spec__, __package__, type(__loader__).__name__, __doc__[:10]],
        "module": again.__class__ is Own and Own.__module__,
        "locals": sorted(name for name in globals() if "debug" in name.lower()),
        "globals": sorted(globals()) == sorted(locals()),
        "usage": argparse.ArgumentParser().prog,
        "ours in the pickle": b"ddpdebug" in text,
        "builtins": type(__builtins__).__name__,
        "argv0": os.path.basename(sys.orig_argv[-1]),
        "interactive": hasattr(sys, "ps1"),
    }
    print(json.dumps(seen, indent=1, default=str))
    report([model], [optimizer], losses)
