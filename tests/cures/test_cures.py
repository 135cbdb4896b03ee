"""Cures: what they make of the corpus' faults, and what they refuse."""

from __future__ import annotations

import ast
from typing import Any

import pytest
from corpus_twins import twin

from ddpdebug.cures.cures import CURES, ELSEWHERE, cure
from ddpdebug.cures.source import CannotError, Source
from ddpdebug.detectors.pages import pages
from ddpdebug.schema.finding import Finding, Severity


def line_of(text: str, words: str) -> int:
    return next(number for number, line in enumerate(text.splitlines(), 1) if words in line)


def _cured(text: str, code: str, line: int | None, subject: tuple[str, ...] = (), **evidence: Any) -> str:
    finding = Finding(code=code, severity=Severity.ERROR, title="x", subject=subject, evidence=evidence)
    return cure(text.encode(), finding, line)[0].changed()


@pytest.mark.parametrize(
    "name, code, words, more",
    [
        ("rcp813_clip_before_unscale", "RCP813", "clip_grad_norm_", {}),
        ("rcp806_scheduler_in_micro_batch_loop", "RCP806", "schedule.step()", {"stepped": "per micro-batch"}),
        ("data902_set_epoch_missing", "DATA902", None, {}),
        ("rank102_batch_norm_without_broadcast", "RANK102", None, {"broadcast_buffers": False}),
        ("rcp802_softmax_in_the_model", "RCP802", "criterion(model(x), y)", {"applied_before": "softmax"}),
        ("rcp802_softmax_and_soft_targets", "RCP802", "F.cross_entropy(", {"applied_before": "softmax"}),
        ("rcp809_window_not_divided", "RCP809", ".backward()", {"micro_batches": 6}),
        ("rcp817_layers_in_a_plain_list", "RCP817", None, {}),
    ],
)
def test_the_faulty_script_becomes_its_clean_twin(
    name: str, code: str, words: str | None, more: dict[str, Any]
) -> None:
    """The change is exactly the difference of the two."""
    faulty = twin(name, fault=True)
    fixed = _cured(faulty, code, None if words is None else line_of(faulty, words), ("blocks[0]",), **more)
    clean = twin(name, fault=False).replace("/ WINDOW", "/ 6")  # what the run has counted stands in the change
    assert ast.dump(ast.parse(fixed)) == ast.dump(ast.parse(clean))


_DATA901 = ["sampler=torch.utils.data.DistributedSampler(data)"], ["shuffle=True"]


@pytest.mark.parametrize(
    "name, code, at, subject, added, removed",
    [
        ("rcp808_zero_grad_missing", "RCP808", "opt.step()", (), ["        opt.zero_grad()"], []),
        ("mem403_losses_appended", "MEM403", "losses.append", ("losses",), ["(loss.detach())"], ["append(loss)"]),
        ("mem403_running_average", "MEM403", "track.append", ("average",), [").detach()"], ["0.02 * value"]),
        ("rcp804_eval_mode_left_after_validation", "RCP804", "loss = F.cross", ("drop",), ["    model.train()"], []),
        ("rcp816_cleared_before_the_step", "RCP816", "backward()", (), ["    opt."], ["    opt."]),
        ("rcp816_cleared_in_the_micro_batch_loop", "RCP816", "backward()", (), [".zero_grad()"], [".zero_grad()"]),
        ("data901_same_seed_no_sampler", "DATA901", None, (), *_DATA901),
        (
            *("sync207_parameter_unused_on_one_rank", "FAIL1001", None, ("box.weight",)),
            *([", find_unused_parameters=True)"], ["DDP("]),
        ),
        ("rank110_noise_alike_on_all_ranks", "RANK110", None, (), ["+ torch.distributed.get_rank()"], []),
    ],
)
def test_the_lines_that_change(
    name: str, code: str, at: str | None, subject: tuple[str, ...], added: list[str], removed: list[str]
) -> None:
    """Where the twin does it in another way, one line comes, goes or moves, and nothing else is touched."""
    text = twin(name, fault=True)
    if code == "DATA901":  # without what only the twin uses
        text = "".join(line for line in text.splitlines(keepends=True) if "DistributedSampler(" not in line)
    finding = Finding(code=code, severity=Severity.ERROR, title="x", subject=subject)
    source, about = cure(text.encode(), finding, None if at is None else line_of(text, at))
    lines = source.diff("train.py").splitlines()
    assert lines[:2] == ["--- a/train.py", "+++ b/train.py"]
    came = [line[1:] for line in lines[2:] if line.startswith("+")]
    went = [line[1:] for line in lines[2:] if line.startswith("-")]
    assert len(came) == len(added)
    assert all(words in line for words, line in zip(added, came, strict=True))
    assert all(words in line for words, line in zip(removed, went, strict=True))
    assert about.endswith(".")


_KEYS = 'Missing key(s) in state_dict: "{}fc.weight". Unexpected key(s) in state_dict: "{}fc.weight".'


@pytest.mark.parametrize(
    "code, before, after, evidence",
    [
        ("FAIL1016", "m = DDP(net, device_ids=[0])", "m = DDP(net)", {"error": "parameters {device(type='cpu')}"}),
        (
            *("FAIL1030", "import torch\nnet.load_state_dict(saved)"),
            (
                'import torch\ntorch.nn.modules.utils.consume_prefix_in_state_dict_if_present(saved, "module.")\n'
                "net.load_state_dict(saved)"
            ),
            {"error": _KEYS.format("", "module.")},
        ),
        (
            *("FAIL1030", "m.load_state_dict(torch.load(f))", "m.module.load_state_dict(torch.load(f))"),
            {"error": _KEYS.format("module.", "")},
        ),
        ("FAIL1034", "scaler.step(opt)", "scaler.step(opt)\nscaler.update()", {}),
        ("FAIL1043", "w = self.net.width + 1", "w = self.net.module.width + 1", {"error": "has no attribute 'width'"}),
        ("FAIL1044", "d = DataLoader(data, 4)", "d = DataLoader(data, 4, drop_last=True)", {}),
        ("RCP819", "l = mse(f(x), y)", "l = mse(f(x).squeeze(-1), y)", {"prediction": [4, 1]}),
        (
            "RCP819",
            "l = mse(f(x), y)\nl.backward()",
            "l = mse(f(x).squeeze(-1), y)\nl.backward()",
            {"prediction": [4, 1]},
        ),
        ("RCP819", "l = mse(f(x), a + b)", "l = mse(f(x), (a + b).squeeze(-1))", {"prediction": [4]}),
    ],
)
def test_the_line_that_comes_of_it(code: str, before: str, after: str, evidence: dict[str, Any]) -> None:
    """Whole files of a line or two."""
    assert _cured(before + "\n", code, before.count("\n") + 1, **evidence) == after + "\n"


def test_the_wrapper_is_called() -> None:
    """The model inside of it is no longer called past it."""
    text = "loss = f(ddp.module(x), y)\nloss.backward()\n"
    assert _cured(text, "SYNC202", 1) == "loss = f(ddp(x), y)\nloss.backward()\n"


_LOOP = "for x in data:\n    loss = model(x)\n    loss.backward()\n    {}\n"


@pytest.mark.parametrize(
    "text, code, line, said",
    [
        (_LOOP.format("a_opt.step(); b_opt.step()"), "RCP808", 3, "several optimizer steps"),
        (_LOOP.format("pass"), "RCP808", 3, "no optimizer step"),
        (_LOOP.format("opt.step()") + "opt.zero_grad()\n", "RCP808", 3, "are cleared there"),
        (_LOOP.format("opt.step(); log()"), "RCP808", 3, "more than one statement"),
        (_LOOP.format("opt.step()"), "RCP808", None, "names no line"),
        (_LOOP.format("opt.step()"), "RCP808", 99, "no statement on line 99"),
        ("a.softmax(1)\nb.softmax(1)\n", "RCP802", 1, "2 uses of softmax"),
        ("losses.append(float(loss))\n", "MEM403", 1, "not a tensor by name"),
        ("m = DDP(a, static_graph=True)\n", "FAIL1001", None, "told already"),
        ("m = DDP(a, broadcast_buffers=flag)\n", "RANK102", None, "no wrappers with broadcast_buffers=False"),
        ("def broken(:\n", "RCP808", 1, "no Python"),
        ("x = 1\n", "RANK101", 1, "no mechanical cure"),
        ("self.losses = make()\n", "RCP817", None, "no list and no dict"),
        ("scaler.step(opt); scaler.update()\n", "FAIL1034", 1, "without an update"),
        ("m.losses(x)\n", "FAIL1043", 1, "part of the forward"),
        ("m = DDP(a, device_ids=[0])\n", "FAIL1016", None, "several devices"),
        ("d = DataLoader(a, drop_last=False)\n", "FAIL1044", None, "says already"),
        ("m.load_state_dict(s)\n", "FAIL1030", 1, "not known"),
    ],
)
def test_what_leaves_a_choice_is_refused(text: str, code: str, line: int | None, said: str) -> None:
    """With the reason."""
    with pytest.raises(CannotError, match=said):
        _cured(text, code, line, ("losses",), applied_before="softmax", error="has no attribute 'losses'")


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_the_rest_of_the_file_stays(newline: str) -> None:
    """Line ends, comments, tabs, characters of several bytes, and a last line without an end."""
    text = newline.join(
        ["# größe", "while go:", "\tloss.backward()  # ← here", "\topt.step()  # ok", "\tπ = 'ä'", "x = 1"]
    )
    changed = _cured(text, "RCP808", 3)
    assert changed == text.replace("# ok", f"# ok{newline}\topt.zero_grad()")
    source = Source(b"while go:\n    opt.step()")
    source.insert("opt.zero_grad()", after=source.statement(2))
    assert source.changed() == "while go:\n    opt.step()\n    opt.zero_grad()\n"


def test_cures_are_of_codes_that_exist() -> None:
    """Each says what it does."""
    assert CURES.keys() <= pages().keys()
    assert CURES.keys() >= ELSEWHERE
    assert all(one.__doc__ for one in CURES.values())
