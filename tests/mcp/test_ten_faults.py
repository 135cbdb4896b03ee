"""Of ten faults that were put into scripts, the server's answers have what somebody needs to mend each."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from mcp import Client, StdioServerParameters

sys.path.insert(0, str(Path(__file__).parent.parent / "detection"))
import recorded_runs

from ddpdebug.detectors.pages import pages

#: Recorded run -> code, step, ranks, what the code is about, line of the script, and a word of what to do.
_FAULTS: dict[str, tuple[str, int, list[int], str, int, str]] = {
    "data903_class_out_of_range": ("DATA903", 12, [0, 1], "labels", 33, "number classes from 0"),
    "data910_another_version_on_one_node": ("DATA910", 15, [2], "items", 69, "checksums"),
    "mem401_one_long_batch": ("MEM401", 22, [2], "gate", 36, "length"),
    "num301_attention_logits_in_half": ("NUM301", 12, [1], "blocks.0.attend", 34, "float32"),
    "num303_length_of_a_zero_vector": ("NUM303", 5, [3], "stack.1.unit", 31, "eps under the root"),
    "rank101_checkpoint_loaded_on_one_rank": ("RANK101", 36, [0], "encoder.bias_hh_l0", 70, "on every rank"),
    "rcp804_encoder_unpickled_in_eval": ("RCP804", 0, [0, 1], "encoder", 61, "model.train()"),
    "rcp819_hand_written_huber": ("RCP819", 0, [0, 1], "Mean", 48, "squeeze(-1)"),
    "sync202_loss_method_of_the_module": ("SYNC202", 0, [0, 1], "out.bias", 57, "call the DDP object"),
    "sync205_flag_set_after_forward": ("SYNC205", 0, [0, 1], "blocks.0.ln1.bias", 65, "require_backward_grad_sync"),
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The ten runs, each with what today's rules find in it."""
    known = {
        run.script: run
        for family in sorted({recorded_runs.family(name) for name in _FAULTS})
        for run in recorded_runs.read(recorded_runs.FOLDER, family)
        if run.fault
    }
    for name in _FAULTS:
        directory = tmp_path / "ddpdebug-runs" / name
        directory.mkdir(parents=True)
        recorded_runs.lay_out(known[name], directory)
        lines = [finding.to_json() + "\n" for finding in recorded_runs.judge(known[name])]
        (directory / "findings.jsonl").write_text("".join(lines), encoding="utf-8")
    return tmp_path


def test_rank_step_parameter_line_and_remedy_are_in_the_answers(root: Path) -> None:
    """Through the official client, by no other tools than those of the server."""

    async def ask(client: Any, tool: str, **arguments: Any) -> Any:
        result = await client.call_tool(tool, arguments)
        assert not result.is_error, result.content[0].text
        return json.loads(result.content[0].text)

    async def act() -> None:
        words = ["-m", "ddpdebug", "mcp", str(root)]
        async with Client(StdioServerParameters(command=sys.executable, args=words, env=dict(os.environ))) as client:
            runs = {Path(run["run"]).name: run["run"] for run in (await ask(client, "list_runs"))["runs"]}
            assert runs.keys() == _FAULTS.keys()
            for name, (code, step, ranks, subject, line, remedy) in _FAULTS.items():
                answer = await ask(client, "findings", run=runs[name], code=code)
                (finding, *_) = answer["findings"]
                assert (finding["step"], finding["ranks"]) == (step, ranks), name
                assert subject in finding["subject"], name
                assert finding["location"].endswith(f"{name}.py:{line}"), name
                assert any(remedy in action for action in finding["actions"]), (name, finding["actions"])
                assert finding["restart"]["cause"], name
                assert (await ask(client, "explain", code=code))["remedy"] == pages()[code].prose["remedy"]

    asyncio.run(act())
