"""A small training of two or more ranks in which one of them stops, or leaves, or calls something else.

    python stops.py KIND RANK STEP SECONDS [TIMEOUT]

The line that stops is marked with `# stops`; what is marked with `# other` is the other side of a mismatch. Lines of
the training loop have marks of their own. "stops" is printed with the moment at which it begins.
"""

import concurrent.futures
import ctypes
import datetime
import fcntl
import multiprocessing
import os
import pdb
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

KIND, RANK, STEP, SECONDS = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
#: Of the process group, in seconds.
TIMEOUT = float(sys.argv[5]) if len(sys.argv) > 5 else 120.0
PATTERN = re.compile(r"(a+)+$")
#: After which a rank is killed from outside: by then it has been seen where it stands.
KILL_SECONDS = 1.5


class Slow(Dataset):
    """Items; one of them is never made by the worker of the rank that stops."""

    def __init__(self, rank):
        self.rank = rank
        self.lock = threading.Lock()

    def __len__(self):
        return (STEP + 1) * 4 if KIND.startswith("uneven") and self.rank == RANK else 400

    def __getitem__(self, index):
        if self.rank == RANK and index // 4 == STEP + 2:
            if KIND == "worker_blocked":
                time.sleep(SECONDS)
            if KIND == "worker_stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            if KIND == "worker_killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if KIND == "worker_lock":
                with self.lock:
                    pass
            if KIND == "worker_busy":
                end = time.monotonic() + SECONDS
                while time.monotonic() < end:
                    sum(range(1000))
        return torch.full((8,), float(index % 7))


def work(seconds):
    end = time.monotonic() + seconds
    value = 0
    while time.monotonic() < end:
        value += sum(range(1000))
    return value


def write(seconds):
    end = time.monotonic() + seconds
    with open(f"checkpoint-{os.getpid()}.bin", "wb") as file:
        while time.monotonic() < end:
            file.write(b"x" * 65536)
            file.flush()
            os.fsync(file.fileno())
            file.seek(0)
            time.sleep(0.05)


def fetch(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.3)


def stop(rank, groups, model):  # noqa: C901, PLR0911, PLR0912, PLR0915
    """Do what this run is about; returns "break" to leave the loop."""
    here = rank == RANK
    print(f"stops {time.monotonic() + (KILL_SECONDS if KIND == 'sigkill' else 0)}", flush=True)
    if KIND == "lock" and here:
        lock = threading.Lock()
        lock.acquire()
        lock.acquire(timeout=SECONDS)  # stops
    elif KIND == "queue" and here:
        try:
            queue.Queue().get(timeout=SECONDS)  # stops
        except queue.Empty:
            pass
    elif KIND == "simple_queue" and here:
        items = queue.SimpleQueue()
        try:
            items.get(timeout=SECONDS)  # stops
        except queue.Empty:
            pass
    elif KIND == "socket" and here:
        one, other = socket.socketpair()
        one.settimeout(SECONDS)
        try:
            one.recv(10)  # stops
        except TimeoutError:
            pass
        other.close()
    elif KIND == "accept" and here:
        server = socket.create_server(("127.0.0.1", 0))
        server.settimeout(SECONDS)
        try:
            server.accept()  # stops
        except TimeoutError:
            pass
    elif KIND == "pipe" and here:
        read, write_end = os.pipe()
        threading.Timer(SECONDS, os.close, (write_end,)).start()
        os.read(read, 10)  # stops
    elif KIND == "fifo" and here:
        os.mkfifo(f"fifo-{os.getpid()}")
        threading.Timer(SECONDS, lambda: os.open(f"fifo-{os.getpid()}", os.O_WRONLY)).start()
        open(f"fifo-{os.getpid()}").read()  # stops
    elif KIND == "stdin" and here:
        read, write_end = os.pipe()
        sys.stdin = os.fdopen(read)
        threading.Timer(SECONDS, os.write, (write_end, b"go on\n")).start()
        input("continue? ")  # stops
    elif KIND == "debugger" and here:
        read, write_end = os.pipe()
        threading.Timer(SECONDS, os.write, (write_end, b"continue\n")).start()
        pdb.Pdb(stdin=os.fdopen(read), stdout=sys.stdout, nosigint=True).set_trace()
        step = STEP  # stops
    elif KIND == "key" and here:
        store = dist.distributed_c10d._get_default_store()
        store.wait(["never"], datetime.timedelta(seconds=SECONDS))  # stops
    elif KIND == "child_pipe" and here:
        child = subprocess.Popen(["sleep", str(SECONDS)], stdout=subprocess.PIPE)
        child.stdout.read()  # stops
    elif KIND == "mp_queue" and here:
        try:
            multiprocessing.Queue().get(timeout=SECONDS)  # stops
        except queue.Empty:
            pass
    elif KIND == "future" and here:
        pool = concurrent.futures.ThreadPoolExecutor(1)
        pool.submit(time.sleep, SECONDS).result()  # stops
    elif KIND == "condition" and here:
        changed = threading.Condition()
        with changed:
            changed.wait(SECONDS)  # stops
    elif KIND == "flock" and here:
        held, wanted = open("lock", "w"), open("lock", "w")
        fcntl.flock(held, fcntl.LOCK_EX)
        threading.Timer(SECONDS, fcntl.flock, (held, fcntl.LOCK_UN)).start()
        fcntl.flock(wanted, fcntl.LOCK_EX)  # stops
    elif KIND == "process" and here:
        subprocess.run(["sleep", str(SECONDS)], check=True)  # stops
    elif KIND == "sleep" and here:
        time.sleep(SECONDS)  # stops
    elif KIND == "poll" and here:
        end = time.monotonic() + SECONDS
        while time.monotonic() < end and not os.path.exists("never"):
            time.sleep(0.25)  # stops
    elif KIND == "event" and here:
        threading.Event().wait(SECONDS)  # stops
    elif KIND == "join" and here:
        thread = threading.Thread(target=time.sleep, args=(SECONDS,), daemon=True)
        thread.start()
        thread.join()  # stops
    elif KIND == "pool" and here:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(fetch, SECONDS).result()
    elif KIND == "pool_writes" and here:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(write, SECONDS).result()
    elif KIND == "sigstop" and here:
        subprocess.Popen(["sh", "-c", f"sleep {SECONDS}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)  # stops
    elif KIND == "gil" and here:
        ctypes.PyDLL(None).sleep(int(SECONDS))  # stops
    elif KIND == "regex" and here:
        re.match(r"(a+)+$", "a" * 40 + "b")  # stops
    elif KIND == "pattern" and here:
        PATTERN.search("a" * 40 + "b")  # stops
    elif KIND == "operation":
        tensor = torch.ones(8)
        if here:
            dist.broadcast(tensor, 1 - min(RANK, 1))  # stops
        else:
            dist.all_reduce(tensor)  # other
    elif KIND == "objects":
        if here:
            dist.broadcast_object_list([1], RANK)  # stops
        else:
            dist.all_gather_object([None] * dist.get_world_size(), "x")  # other
    elif KIND == "shape":
        dist.all_reduce(torch.ones(1000 if here else 8))  # stops
    elif KIND == "dtype":
        dist.all_reduce(torch.ones(8, dtype=torch.float64 if here else torch.float32))  # stops
    elif KIND == "root":
        dist.broadcast(torch.ones(8), (rank + 1) % dist.get_world_size())  # stops
    elif KIND == "crossed":
        for group in groups if here else groups[::-1]:
            dist.all_reduce(torch.ones(8), group=group)  # stops
    elif KIND == "conditional" and here:
        dist.all_reduce(torch.ones(1))  # stops
    elif KIND == "extra":
        if here:
            dist.all_reduce(torch.ones(3))  # stops
        dist.all_reduce(torch.ones(3))  # other
    elif KIND == "forward" and here:
        model(torch.ones(4, 8))  # stops
    elif KIND == "barrier" and here:
        dist.barrier()  # stops
    elif KIND == "not_called" and not here:
        dist.barrier()  # other
    elif KIND == "new_group" and here:
        dist.new_group(list(range(dist.get_world_size())))  # stops
    elif KIND == "recv" and here:
        dist.recv(torch.ones(8), (rank + 1) % dist.get_world_size())  # stops
    elif (KIND == "messages" or KIND == "few_messages") and here:  # noqa: PLR1714 - a test reads the kind here
        threading.Event().wait(SECONDS)  # stops
    elif KIND == "skip" and here:
        return "skip"
    elif KIND == "eval" and here:
        model.eval()
        with torch.no_grad():
            model(torch.ones(4, 8))
        model.train()
    elif KIND == "sigkill" and here:
        killer = subprocess.Popen(["sh", "-c", f"sleep {KILL_SECONDS}; kill -KILL {os.getpid()}"])
        killer.wait()  # stops
    elif KIND == "segv" and here:
        os.kill(os.getpid(), signal.SIGSEGV)  # stops
    elif KIND == "return" and here:
        return "break"
    elif KIND == "exit" and here:
        sys.exit(0)  # stops
    elif KIND == "raise" and here:
        raise KeyError("no such sample")  # stops
    elif KIND == "os_exit" and here:
        os._exit(3)  # stops
    elif KIND == "os_exit_all":
        time.sleep(SECONDS * rank)
        os._exit(0)
    elif KIND == "works" and here:
        work(SECONDS)
    elif KIND == "writes" and here:
        write(SECONDS)
    elif KIND == "all_sleep":
        time.sleep(SECONDS)
    elif KIND == "apart":
        time.sleep(SECONDS if rank == RANK else 0)
        return "break"
    return None


def messages(rank, world):
    """Send one message, and meet by messages: gloo counts both among the collectives, on each rank another number."""
    if rank < 2:
        (dist.send if rank == 0 else dist.recv)(torch.ones(2), 1 - rank)
    dist.monitored_barrier()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=TIMEOUT))
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    groups = [dist.new_group(list(range(world))) for _ in range(2)] if KIND == "crossed" else []
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
    model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    workers = 1 if KIND.startswith("worker") else 0
    items = Slow(rank)
    loader = DataLoader(items, batch_size=4, num_workers=workers)
    if KIND == "worker_lock":
        items.lock.acquire()  # as a thread may hold it at the moment in which the worker is forked
    if KIND == "few_messages":
        messages(rank, world)
    if KIND == "messages":  # torch counts them among the collectives, and rank 0 sends more of them than others get
        for peer in range(1, world):
            for _ in range(30):
                dist.send(torch.ones(1), peer) if rank == 0 else dist.recv(torch.ones(1), 0) if rank == peer else None
    for step, batch in enumerate(loader):  # data
        if step < STEP:
            time.sleep(0.3)  # a job that is stopped in its first moment has told nobody where it is
        if step == STEP:
            what = stop(rank, groups, model)
            if what == "break":
                break
            if what == "skip":
                continue
        optimizer.zero_grad()
        loss = model(batch).square().mean()  # forward
        if KIND == "nan_continue" and step == STEP and rank == RANK:
            continue
        loss.backward()  # backward
        optimizer.step()
        if step > STEP + 6:
            break
    if KIND.startswith("uneven") and rank == RANK:
        print(f"stops {time.monotonic()}", flush=True)
    if KIND == "uneven_barrier":
        dist.barrier()  # stops
    print("done", flush=True)
    if KIND in {"apart", "all_sleep"}:
        dist.destroy_process_group()


main()
