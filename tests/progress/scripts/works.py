"""A small training in which ranks wait long for one that is at work, or that looks as if it had stopped: no hang.

    python works.py KIND RANK STEP SECONDS

The rank does what KIND says for about SECONDS in step STEP.
"""

import datetime
import gc
import importlib
import os
import pickle
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

KIND, RANK, STEP, SECONDS = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
BUSY = f"import time; end = time.monotonic() + {SECONDS}\nwhile time.monotonic() < end: sum(range(1000))"


def work(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(1000))


class Items(Dataset):
    def __init__(self, rank):
        self.rank = rank

    def __len__(self):
        return 400

    def __getitem__(self, index):
        if KIND == "slow_loader_everywhere" and index // 4 in (STEP, STEP + 1):
            work(SECONDS / 2 / 4)
        if KIND == "slow_loader" and self.rank == RANK and index // 4 == STEP + 2:
            work(SECONDS / 4)
        if KIND == "first_batch" and self.rank == RANK and index == 0:
            work(SECONDS)
        return torch.full((8,), float(index % 7) + self.rank)


def evaluate(model):
    """Goes through validation data on one rank."""
    end = time.monotonic() + SECONDS
    model.eval()
    with torch.no_grad():
        while time.monotonic() < end:
            model.module(torch.ones(256, 8))
    model.train()


def save(model):
    """Writes a checkpoint again and again, each one down to the disk."""
    end = time.monotonic() + SECONDS
    state = {"model": model.state_dict(), "moments": torch.ones(2_000_000)}
    while time.monotonic() < end:
        with open("checkpoint.tmp", "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace("checkpoint.tmp", "checkpoint.pt")
        time.sleep(0.2)


def import_much():
    """Imports modules that were never compiled, each of which takes a while, in C and under the interpreter's lock."""
    sys.dont_write_bytecode = True
    os.makedirs("much")
    sys.path.insert(0, os.getcwd())
    open("much/__init__.py", "w").close()
    end, number = time.monotonic() + SECONDS, 0
    while time.monotonic() < end:
        number += 1
        with open(f"much/part{number}.py", "w") as file:
            file.writelines(f"def f{i}(a, b=None, *c):\n    return [a + b * {i} for a in c if b]\n" for i in range(4000))
        importlib.invalidate_caches()
        importlib.import_module(f"much.part{number}")


def download():
    """Reads what comes at 20 KB/s."""
    server = socket.create_server(("127.0.0.1", 0))
    if os.fork() == 0:
        connection, _ = server.accept()
        for _ in range(int(SECONDS * 4)):
            connection.sendall(b"x" * 5000)
            time.sleep(0.25)
        os._exit(0)
    client = socket.create_connection(server.getsockname())
    with client.makefile("rb") as file:
        got = file.read()  # all of it, in one call
    assert len(got) == int(SECONDS * 4) * 5000
    os.wait()


def hold_the_lock():
    """Runs in C for seconds at a time: the collector, pickle, a long sum."""
    garbage = [[i] for i in range(4_000_000)]
    gc.collect()
    pickle.dumps(garbage)
    del garbage
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        sum(range(150_000_000))


def find_much():
    """Looks for something in a long text, in one call that keeps the interpreter's lock."""
    text, pattern = "some words " * 100_000, re.compile(r"\w+ \w+ 1")
    began = time.thread_time()
    pattern.findall(text)
    text *= int(SECONDS / (time.thread_time() - began))
    pattern.findall(text)


def compile_much():
    """Traces many graphs on one rank."""
    end, number = time.monotonic() + SECONDS, 0
    while time.monotonic() < end:
        number += 1
        scope = {"torch": torch}
        exec("def f(x):\n" + "".join(f"    x = torch.sin(x) + {i + number}\n" for i in range(100)) + "    return x", scope)
        torch.compile(scope["f"], backend="eager")(torch.ones(8))


def wait_for_a_file():
    """Looks for what rank 0 is writing."""
    while not os.path.exists("prepared"):
        time.sleep(0.5)


def prepare():
    end = time.monotonic() + SECONDS
    with open("preparing", "wb") as file:
        while time.monotonic() < end:
            file.write(os.urandom(65536))
            file.flush()
            os.fsync(file.fileno())
            time.sleep(0.05)
    os.replace("preparing", "prepared")


def act(rank, model):
    here = rank == RANK
    if KIND == "evaluation":
        if here:
            evaluate(model)
        dist.barrier()
    elif KIND == "checkpoint":
        if here:
            save(model)
        dist.barrier()
    elif KIND == "imports" and here:
        import_much()
    elif KIND == "stopped_for_a_moment" and here:
        subprocess.Popen(["sh", "-c", f"sleep {SECONDS}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    elif KIND == "hog" and here:
        hogs = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(4 * os.cpu_count())]
        return hogs
    elif KIND == "compile" and here:
        compile_much()
    elif KIND == "all_sleep":
        time.sleep(SECONDS)
    elif KIND == "download" and here:
        download()
    elif KIND == "in_c" and here:
        hold_the_lock()
    elif KIND == "finds" and here:
        find_much()
    elif KIND == "subprocess" and here:
        subprocess.run([sys.executable, "-c", BUSY], check=True)
    elif KIND == "shell" and here:  # the one that works is a child of the child
        subprocess.run(f"{sys.executable} -c '{BUSY}' | cat; true", shell=True, check=True)
    elif KIND == "copy" and here:  # a child that hardly computes, but moves data
        code = f"import time, os\nfor _ in range(int({SECONDS} * 2)):\n    os.write(1, b'x' * 50000); time.sleep(0.5)"
        with open("copy", "wb") as file:
            subprocess.run([sys.executable, "-c", code], stdout=file, check=True)
    elif KIND == "pool" and here:
        from concurrent.futures import ProcessPoolExecutor

        with ProcessPoolExecutor(2) as pool:
            list(pool.map(work, [SECONDS / 2] * 4))
    elif KIND == "thread" and here:
        items = queue.Queue()
        threading.Thread(target=lambda: (work(SECONDS), items.put(1))).start()
        items.get()
    elif KIND == "file_of_another":
        prepare() if rank == 0 else wait_for_a_file() if rank == 1 else None
        dist.barrier()
    return None


def joined(rank, model, optimizer):
    with model.join():
        for _ in range(40 if rank == RANK else 4):
            work(SECONDS / 40)
            optimizer.zero_grad()
            model(torch.ones(4, 8)).square().mean().backward()
            optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=300))
    rank = dist.get_rank()
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)]
    model = DistributedDataParallel(torch.nn.Sequential(*(layers if KIND != "join" else layers[::2])))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    if KIND == "first_step" and rank == RANK:
        hook = model.module.register_forward_pre_hook(lambda *_: [hook.remove(), work(SECONDS)][1])
    if KIND == "join":
        joined(rank, model, optimizer)
    workers = int("loader" in KIND or KIND == "first_batch")
    loader = DataLoader(Items(rank), batch_size=4, num_workers=workers, persistent_workers=bool(workers))
    hogs = None
    for step, batch in enumerate(loader):
        if step == STEP:
            hogs = act(rank, model)
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        if KIND == "hog":
            time.sleep(0.05)
            going = torch.tensor([float(rank == RANK and any(hog.poll() is None for hog in hogs or []))])
            dist.all_reduce(going)
            if step > STEP and not going:
                break
        elif step > STEP + 6:
            break
    if KIND in {"apart", "apart_at_once"} and rank == RANK:
        time.sleep(SECONDS)
    if KIND == "apart_at_once":
        sys.stdout.flush()
        os._exit(0)
    if KIND != "apart":
        dist.barrier()
    print("done", flush=True)
    time.sleep(0.3)  # gloo's worker may otherwise keep the process at its end
    dist.destroy_process_group()


main()
