"""Scrapers send nonsense, read slowly or nothing, come fifty at a time and break off; SIGPIPE kills.

In the middle of it the job forks, and it ends by os._exit with connections open.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import torch
from _report import batches, listening, report, start, train
from torch import nn

_SCRAPERS = r"""
import contextlib, os, socket, struct, sys, time
port, whole = int(sys.argv[1]), b"GET /metrics HTTP/1.1\r\n\r\n"
served, held = 0, []
def connect():
    return socket.create_connection(("127.0.0.1", port), timeout=20)
for number in range(150):  # gone while the answer is written
    with contextlib.suppress(OSError), connect() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.sendall(whole * (number % 3 + 1))
        time.sleep(number % 10 / 2000)
        if number % 2:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
for sent in (b"\x16\x03\x01\x02", b"\x00\xff\r\n\r\n", os.urandom(4096), b"GET /" + b"x" * 200_000, b"A: b\r\n" * 50_000):
    with contextlib.suppress(OSError), connect() as client:
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        while client.recv(65536):
            pass
for sent in [b"GET /met", whole] * 25:
    with contextlib.suppress(OSError):
        held.append(connect())
        held[-1].sendall(sent)
for client in held[1::2]:
    with contextlib.suppress(OSError):
        served += client.recv(15) in (b"HTTP/1.0 200 OK", b"HTTP/1.1 200 OK")
print(served, flush=True)
with contextlib.suppress(OSError):
    for number in range(600):  # until the job has ended
        held[0].sendall(b"r")
        time.sleep(0.1)
"""

start()
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
model = nn.Linear(16, 4)
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
losses = train(model, optimizer)
assert not listening()
runs = Path("ddpdebug-runs").glob("*/run.json")
ports = [int(json.loads(run.read_text())["metrics_url"].rsplit(":")[-1].partition("/")[0]) for run in runs]
served = 0
assert bool(ports) == (sys.modules.get("ddpdebug") is not None)
scrapers = [
    subprocess.Popen([sys.executable, "-c", _SCRAPERS, str(port)], stdout=subprocess.PIPE, text=True, process_group=0)
    for port in ports
]
losses += train(model, optimizer, batches(150))
for scraper in scrapers:
    served += int(scraper.stdout.readline())
# ours are the threads that Python 3.12 and later tells a process of that forks (docs/harm.md)
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
child = os.fork()
if child == 0:
    train(model, optimizer, batches(10))
    os._exit(3)
end = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
losses += train(model, optimizer, batches(50))
report([model], [optimizer], losses, child=end, answered=bool(served) or not ports, thread=threading.Thread().name)
sys.stdout.flush()
os._exit(9)
