"""Modules of the standard library are None in sys.modules: some before torch comes, others after the first steps.

run: alone
"""

import sys

kept = {name: sys.modules.get(name) for name in ("xmlrpc", "ftplib", "smtplib", "telnetlib", "webbrowser")}
for name in kept:
    sys.modules[name] = None

import torch  # noqa: E402
from _report import report, start, train  # noqa: E402
from torch import nn  # noqa: E402

start()
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
losses = train(model, optimizer)
more = ("json", "socket", "socketserver", "ssl", "secrets", "hmac", "resource", "xxhash", "sqlite3", "tomllib")
held = {name: sys.modules.get(name) for name in more}
sys.modules.update(dict.fromkeys(more))
data = [torch.full((8, 16), value) for value in (1.0, float("nan"), 2.0)]
losses += train(model, optimizer, data)
print([name for name in more if sys.modules[name] is not None])
for name, module in held.items():
    if module is None:
        del sys.modules[name]
    else:
        sys.modules[name] = module
report([model], [optimizer], losses)
