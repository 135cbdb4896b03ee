"""The script's own modules have names of modules that ddpdebug uses.

run: alone
under: for last; do :; done; mkdir own; cp "$(dirname "$last")/_report.py" own; cp "$last" own/train.py; for name in click tomllib html xxhash prometheus_client; do echo 'WHOSE = "mine"' > own/$name.py; done; export PYTHONDONTWRITEBYTECODE=1; exec "${@:1:$#-1}" own/train.py
"""

import sys

import click
import html
import tomllib

print(click.WHOSE, html.WHOSE, tomllib.WHOSE)

import torch
from _report import report, start, train
from torch import nn

import prometheus_client
import xxhash

print([module.WHOSE for module in (prometheus_client, xxhash)])
start()
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
losses = train(model, optimizer)
print([sys.modules[name].WHOSE for name in ("click", "html", "tomllib", "xxhash")])
report([model], [optimizer], losses)
