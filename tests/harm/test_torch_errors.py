"""Frequent errors of torch, really raised: the script ends as without ddpdebug, and the finding says what it means."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytestmark = [pytest.mark.jobs, pytest.mark.slow]

_START = """import os, sys, torch, torch.distributed as dist
from datetime import timedelta
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
rank = int(os.environ.get("RANK", "0"))
torch.manual_seed(0)
"""
_MODEL = """dist.init_process_group("gloo")
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.spare = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 4)
    def forward(self, x):
        return self.second(self.first(x).relu())
model = Net()
"""
_ALONE = """model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
def step(x, y=None):
    opt.zero_grad()
    loss = model(x).square().mean() if y is None else nn.functional.cross_entropy(model(x), y)
    loss.backward()
    opt.step()
for _ in range(3): step(torch.randn(4, 8))
"""


class Case(NamedTuple):
    """A script; the line with the comment `# here` is where it fails."""

    code: str
    source: str
    ranks: int = 1
    failing: tuple[int, ...] = (0,)
    subject: tuple[str, ...] = ()
    phase: str | None = None
    tells: str = ""  # in the evidence


_BOTH = {"ranks": 2, "failing": (0, 1)}
_TRAIN = """opt = torch.optim.SGD(ddp.parameters(), lr=0.1)
for step in range(6):
    loss = ddp(torch.randn(4, 8)).square().mean()  # {forward}
    opt.zero_grad()
    loss.backward()  # {backward}
    opt.step()
"""
_FORWARD, _BACKWARD = _TRAIN.format(forward="here", backward=""), _TRAIN.format(forward="", backward="here")

_LEAVES = (
    _MODEL
    + """del model.spare
ddp = DDP(model)
opt = torch.optim.SGD(ddp.parameters(), lr=0.1)
for step in range(6):
    if rank == 1 and step == 3: {}
    opt.zero_grad()
    ddp(torch.randn(4, 8)).square().mean().backward()
    opt.step()
"""
)

CASES = {
    "unused parameters": Case(
        "FAIL1001", _MODEL + "ddp = DDP(model)\n" + _FORWARD, **_BOTH, subject=("spare.weight", "spare.bias")
    ),
    "a block checkpointed twice": Case(
        "FAIL1002",
        _MODEL
        + """from torch.utils.checkpoint import checkpoint
del model.spare
def forward(x):
    x = checkpoint(model.first, x.requires_grad_(), use_reentrant=True)
    return checkpoint(model.second, x, use_reentrant=True) + checkpoint(model.second, x * 2, use_reentrant=True)
model.forward = forward
ddp = DDP(model)
"""
        + _BACKWARD,
        **_BOTH,
    ),
    "changed in place": Case(
        "FAIL1005", _ALONE + "x = model(torch.randn(4, 8)).sigmoid()\nx.add_(1)\nx.mean().backward()  # here\n"
    ),
    "a graph that is gone": Case(
        "FAIL1006",
        _ALONE
        + "state = model(torch.randn(4, 8))\nfor _ in range(3):\n    (state * 2).square().mean().backward()  # here\n",
    ),
    "no graph": Case("FAIL1007", _ALONE + "torch.tensor(model(torch.randn(4, 8)).mean().item()).backward()  # here\n"),
    "no single number": Case("FAIL1008", _ALONE + "model(torch.randn(4, 8)).square().mean(1).backward()  # here\n"),
    "different models": Case(
        "FAIL1009", _MODEL + "model.second = nn.Linear(16, 4 + rank)\nddp = DDP(model)  # here\n", **_BOTH
    ),
    "nothing to train": Case("FAIL1010", _MODEL + "ddp = DDP(model.requires_grad_(False))  # here\n", **_BOTH),
    "labels": Case(
        "FAIL1011",
        _ALONE + "y = torch.tensor([1, 4])\nnn.functional.cross_entropy(model(torch.randn(2, 8)), y)  # here\n",
        phase="loss",
        tells="int64 [2], 1 to 4",
    ),
    "an embedding": Case("FAIL1012", _ALONE + "nn.Embedding(10, 4)(torch.tensor([3, 10]))  # here\n"),
    "shapes": Case("FAIL1013", _ALONE + "model(torch.randn(4, 9))  # here\n", phase="forward"),
    "dtypes": Case("FAIL1014", _ALONE + "model(torch.randn(4, 8, dtype=torch.float64))  # here\n"),
    "device arguments": Case("FAIL1016", _MODEL + "DDP(model, device_ids=[0])  # here\n", **_BOTH),
    "no group": Case("FAIL1017", _ALONE + "dist.barrier()  # here\n"),
    "two groups": Case(
        "FAIL1018", 'dist.init_process_group("gloo")\ndist.init_process_group("gloo")  # here\n', **_BOTH
    ),
    "no variables": Case(
        "FAIL1019",
        'for key in ("RANK", "WORLD_SIZE"): os.environ.pop(key, None)\ndist.init_process_group("gloo")  # here\n',
    ),
    "a port that is taken": Case(
        "FAIL1020",
        """import socket
taken = socket.create_server(("127.0.0.1", 0))
dist.TCPStore("127.0.0.1", taken.getsockname()[1], 1, is_master=True)  # here
""",
    ),
    "nobody listens": Case(
        "FAIL1021",
        """import socket
closed = socket.socket()
closed.bind(("127.0.0.1", 0))
dist.TCPStore("127.0.0.1", closed.getsockname()[1], 2, is_master=False, timeout=timedelta(seconds=1))  # here
""",
    ),
    "a key that does not come": Case(
        "FAIL1022",
        """store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=timedelta(seconds=1))
store.get("never")  # here
""",
    ),
    "the prefix of a wrapper": Case(
        "FAIL1030",
        _ALONE
        + 'model.load_state_dict({"module." + key: value for key, value in model.state_dict().items()})  # here\n',
        subject=("0.weight", "0.bias", "2.weight", "2.bias"),
    ),
    "another head": Case(
        "FAIL1031",
        _ALONE
        + "nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 9)).load_state_dict(model.state_dict())  # here\n",
        subject=("2.weight", "2.bias"),
    ),
    "more than weights": Case(
        "FAIL1032",
        'class Settings: pass\ntorch.save({"settings": Settings()}, "a.pt")\ntorch.load("a.pt")  # here\n',
    ),
    "other groups": Case(
        "FAIL1033",
        _ALONE + "torch.optim.SGD(model[0].parameters(), lr=0.1).load_state_dict(opt.state_dict())  # here\n",
    ),
    "the scaler twice": Case(
        "FAIL1034",
        _ALONE
        + """scaler = torch.amp.GradScaler("cpu")
scaler.scale(model(torch.randn(4, 8)).mean()).backward()
scaler.unscale_(opt)
scaler.unscale_(opt)  # here
""",
    ),
    "an anomaly": Case(
        "FAIL1035",
        _ALONE
        + """torch.autograd.set_detect_anomaly(True)
(model(torch.randn(4, 8)).relu() * 0).sqrt().mul(0).sum().backward()  # here
""",
    ),
    "memory": Case("FAIL1036", _ALONE + "torch.empty(1 << 50)  # here\n"),
    "a worker that is killed": Case(
        "FAIL1037",
        _ALONE
        + """class Data(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, index): os.kill(os.getpid(), 9)
for x in DataLoader(Data(), num_workers=1): pass  # here
""",
    ),
    "a lambda for a worker": Case(
        "FAIL1038",
        _ALONE
        + """data = DataLoader([1, 2], num_workers=1, collate_fn=lambda x: x, multiprocessing_context="spawn")
for x in data: pass  # here
""",
    ),
    "samples of two sizes": Case(
        "FAIL1040", _ALONE + "for x in DataLoader([torch.ones(2), torch.ones(3)], batch_size=2): pass  # here\n"
    ),
    "a rank that leaves": Case(
        "FAIL1024",
        _MODEL
        + """del model.spare
ddp = DDP(model)
opt = torch.optim.SGD(ddp.parameters(), lr=0.1)
for step in range(6):
    if rank == 1 and step == 3:
        raise KeyError("labels")  # here
    opt.zero_grad()
    ddp(torch.randn(4, 8)).square().mean().backward()
    opt.step()
""",
        ranks=2,
        failing=(1,),
        tells="KeyError: 'labels'",
    ),
    "a rank that has less to do": Case(
        "FAIL1024", _LEAVES.format("break"), ranks=2, failing=(1,), tells="finished after 3 optimizer steps"
    ),
    "a rank that goes without a word": Case(
        "FAIL1024", _LEAVES.format("os._exit(0)"), ranks=2, failing=(1,), tells="without a word"
    ),
    "a rank that goes before the others are met": Case(
        "FAIL1024",
        """import sys, time
if internals := sys.modules.get("ddpdebug.torch_internals"):
    internals.GlooGroup = lambda *place: time.sleep(600)  # the ranks' side group waits for a rank that has gone
"""
        + _LEAVES.format("os._exit(0)"),
        ranks=2,
        failing=(1,),
        tells="without a word",
    ),
    "a method of the model": Case(
        "FAIL1043", _MODEL + "ddp = DDP(model)\nddp.generate(torch.randn(4, 8))  # here\n", **_BOTH
    ),
    "one sample": Case(
        "FAIL1044", _ALONE + "nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))(torch.randn(1, 8))  # here\n"
    ),
    "a worker that raises": Case(
        "FAIL1045",
        _ALONE
        + """class Data(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, index): return {}[f"sample {index}"]
for x in DataLoader(Data(), num_workers=1): pass  # here
""",
        tells="KeyError: 'sample 0'",
    ),
    "no samples": Case("FAIL1046", _ALONE + "DataLoader([], shuffle=True)  # here\n"),
    "a lazy layer": Case("FAIL1047", _MODEL + "model.second = nn.LazyLinear(4)\nddp = DDP(model)  # here\n", **_BOTH),
    "a column of targets": Case(
        "FAIL1013",
        _ALONE + "nn.functional.binary_cross_entropy_with_logits(model(torch.randn(2, 8)), torch.zeros(2))  # here\n",
        phase="loss",
        tells="float32 [2, 4]",
    ),
    "a culprit and its victim": Case(
        "FAIL1011",
        _MODEL
        + """del model.spare
ddp = DDP(model)
opt = torch.optim.SGD(ddp.parameters(), lr=0.1)
for step in range(6):
    opt.zero_grad()
    labels = torch.tensor([1, 2, 3, 4 if rank == 1 and step == 3 else 0])
    nn.functional.cross_entropy(ddp(torch.randn(4, 8)), labels).backward()  # here
    opt.step()
""",
        ranks=2,
        failing=(1,),
    ),
}


def _without_numbers(text: str) -> str:
    return re.sub(r"0x\w+|\d+", "", text)


@pytest.fixture(scope="module")
def ended(
    selected: set[tuple[str, ...]],
    run_jobs: Callable[[list[dict[str, Any]]], list[Any]],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, tuple[Any, Any, Path]]:
    """The two ends of every selected case, plain and attached, and the folder of its script."""
    chosen = [name for name in CASES if (name,) in selected]
    jobs, folders = [], []
    for name in chosen:
        folders.append(tmp_path_factory.mktemp("case"))
        (folders[-1] / "case.py").write_text(_START + CASES[name].source)
        for options in (None, ["--metrics", "off", "--out", "run"]):
            job = {"script": str(folders[-1] / "case.py"), "ranks": CASES[name].ranks, "options": options}
            jobs.append({**job, "cwd": str(folders[-1])})
    results = run_jobs(jobs)
    return {name: (*results[2 * i : 2 * i + 2], folders[i]) for i, name in enumerate(chosen)}


@pytest.mark.parametrize("name", CASES)
def test_the_error_is_explained_and_the_same(name: str, ended: dict[str, tuple[Any, Any, Path]]) -> None:
    """The job ends by the same error, and one finding names its code, the first rank, the line and the parameters."""
    case = CASES[name]
    plain, watched, folder = ended[name]
    assert [end["status"] for end in watched] == [end["status"] for end in plain], watched
    found = [json.loads(line) for line in (folder / "run" / "findings.jsonl").read_text().splitlines()]
    known = {f["id"]: f for f in found if f["code"].startswith("FAIL")}
    gone = [f for f in found if f["code"] == "HANG503"]
    if case.code == "FAIL1024" and gone and not known:  # the others waited for so long that they were asked about it
        assert {rank for f in gone for rank in f["ranks"]} == set(case.failing)
        assert all(set(f["evidence"]["missing"]) == {str(rank) for rank in case.failing} for f in gone)
        return
    assert [f["code"] for f in known.values()] == [case.code], watched[0]["err"]
    finding = next(iter(known.values()))
    assert set(finding["ranks"]) <= set(case.failing)
    assert finding["severity"] == "critical"
    lines = (folder / "case.py").read_text().splitlines()
    here = [f"case.py:{number}" for number, line in enumerate(lines, 1) if line.endswith("# here")]
    assert finding["location"] == (here[0] if here else None)
    assert case.tells in json.dumps(finding["evidence"])
    assert tuple(finding["subject"]) == case.subject or not case.subject
    assert finding["phase"] == case.phase or not case.phase
    about_labels = [f for f in found if f["code"] == "DATA903"]
    assert {f["step"] for f in about_labels} <= {finding["step"]}
    assert bool(about_labels) == (case.code == "FAIL1011")
    if case.code == "FAIL1024":
        return  # how a broken connection shows, and on which rank, is chance
    rank = finding["ranks"][0]
    first = _without_numbers(finding["evidence"]["error"].partition(": ")[2][:40])
    assert first in _without_numbers(plain[rank]["err"])
    assert first in _without_numbers(watched[rank]["err"])
