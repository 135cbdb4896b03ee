"""Scripts of every kind end, print and leave the same with ddpdebug as without; `situations/` has one for each."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

_HERE = Path(__file__).resolve().parent
sys.path.append(str(_HERE))
import pairs  # noqa: E402

_PAGE = _HERE.parent.parent / "docs" / "harm.md"
_ALL = {situation.path.stem: situation for situation in pairs.situations()}
#: Those in which the ranks' talk begins, ends or breaks in ways of its own, or has much to say.
_OVER_A_TREE = (
    "exit_ddp_exception_ranks",
    "exit_elastic_restart",
    "exit_kill_rank",
    "exit_second_group",
    "exit_store_dies",
    "exit_uneven",
    "module_hooks_nan",
    "process_groups",
    "python_random_of_ranks",
    "signal_int_waiting",
    "signal_stop_continue",
    "thread_parallel_ddp",
)


#: What `make test` has, of each kind some; the others run for each change as well, but for those that take long.
_ALWAYS = {
    "container_generator",
    "container_hostile",
    "disk_directory_deleted",
    "exit_code_in_loop",
    "exit_second_group",
    "exit_uneven",
    "input_shapes",
    "input_sparse_csr",
    "mode_autocast",
    "mode_counting",
    "mode_inference",
    "mode_profiler",
    "module_forward_counts_nan",
    "module_hooks",
    "module_parametrized",
    "module_user_patches",
    "optimizer_closures",
    "optimizer_in_backward",
    "process_collectives",
    "process_fork",
    "python_inspect",
    "python_random",
    "subclass_dispatch",
    "thread_parallel_ddp",
    "warning_places",
}
#: Of those that take long, what is run for each change all the same.
_ALSO = {"signal_int", "stream_broken_pipe"}
#: Run by `make test-thorough`: each is a variant of one that CI runs.
_VARIANTS = {
    "compile_functions_of_evaluation": "compile_evaluation",
    "compile_later": "compile_model",
    "container_kinds": "container_counts",
    "container_lengths": "container_counts",
    "container_loops": "container_hostile",
    "environment_bare": "disk_read_only",
    "environment_locale": "environment_settings_once",
    "exit_abort": "exit_segv",
    "exit_hang_stop_waits": "exit_hang_stop_uneven",
    "exit_index": "exit_in_forward",
    "exit_keeper_killed": "exit_keeper",
    "exit_text": "exit_exception_hook",
    "exit_torchrun_codes": "exit_torchrun_interrupt",
    "hub_dead": "hub_refuses",
    "input_mkldnn": "input_quantized",
    "input_nested_strided": "input_nested_jagged",
    "input_sparse_csr_ddp": "input_sparse_csr",
    "input_sparse_other": "input_sparse_csr",
    "launch_compiled_file": "launch_zip_application",
    "launch_package": "launch_zip_application",
    "launch_profiled": "launch_zip_application",
    "limit_recursion": "python_recursion_depth",
    "limit_threads": "limit_no_threads",
    "mode_profiler_schedule": "mode_profiler",
    "mode_strict_dispatch": "mode_counting",
    "module_hook_raises": "module_hooks",
    "module_swapped": "module_swapped_ddp",
    "process_closerange": "process_closerange_after_group",
    "process_closerange_between_groups": "process_closerange_after_group",
    "process_loader_spawn": "process_spawn_ranks",
    "process_spawn": "process_spawn_ranks",
    "process_spawn_killed": "process_spawn_raises",
    "process_spawn_no_guard": "process_spawn_raises",
    "process_spawn_ways": "process_spawn_ranks",
    "python_argspec": "python_argspec_ddp",
    "python_bytes_strict": "python_optimized",
    "python_dev": "python_optimized",
    "python_f_locals": "python_f_locals_of_ranks",
    "python_frame_depth": "python_frame_depth_ddp",
    "python_gc": "python_gc_callbacks",
    "python_identity": "python_optimized",
    "python_time": "python_clock",
    "python_tracemalloc": "python_optimized",
    "replay_queue": "replay_globals",
    "sharded_meshes": "sharded_fsdp",
    "signal_term_default": "signal_int",
    "stream_ascii": "stream_closed_stderr",
    "stream_captured": "stream_replaced",
    "subclass_refuses": "subclass_parameters",
    "thread_evaluates": "thread_evaluates_loss",
    "thread_join": "thread_join_ddp",
    "thread_parallel": "thread_parallel_ddp",
}


def _cases() -> list[object]:
    marks = {name: [pytest.mark.smoke] for name in _ALL if name not in _ALWAYS}
    marks |= {name: [pytest.mark.slow] for name, one in _ALL.items() if one.slow and name not in _ALSO}
    marks |= {name: [pytest.mark.thorough] for name in _VARIANTS}
    return [pytest.param(name, marks=marks.get(name, [])) for name in _ALL]


def _chosen(request: pytest.FixtureRequest, test: str) -> list[pairs.Situation]:
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    here = [item for item in items if item.path == request.path and item.originalname == test]
    return [_ALL[name] for name in sorted({item.callspec.params["name"] for item in here})]


@pytest.fixture(scope="module")
def seen(request: pytest.FixtureRequest) -> dict[str, pairs.Pair]:
    """Run what is selected, plain and attached."""
    return pairs.run(_chosen(request, "test_same"))


@pytest.fixture(scope="module")
def seen_over_a_tree(request: pytest.FixtureRequest) -> dict[str, pairs.Pair]:
    """The same where the ranks talk and are judged as very many do."""
    return pairs.run(_chosen(request, "test_same_over_a_tree"), tree=True)


@pytest.mark.jobs
@pytest.mark.parametrize("name", _cases())
def test_same(name: str, seen: dict[str, pairs.Pair]) -> None:
    """Exit, output, warnings, files, memory, and the bits of everything that was trained."""
    if _ALL[name].skipped:
        pytest.skip(_ALL[name].skipped)
    pair = seen[name]
    assert all(result["status"] is not None for result in pair.plain), pair.plain
    assert pair.differences == [], pair.errors


@pytest.mark.thorough
@pytest.mark.jobs
@pytest.mark.parametrize("name", _OVER_A_TREE)
def test_same_over_a_tree(name: str, seen_over_a_tree: dict[str, pairs.Pair]) -> None:
    """Few ranks whose exchange is that of very many end, print and leave the same as well."""
    pair = seen_over_a_tree[name]
    assert all(result["status"] is not None for result in pair.plain), pair.plain
    assert pair.differences == [], pair.errors


def test_variants_are_situations_of_which_the_other_one_is_run() -> None:
    """None is left out for one that is left out as well."""
    assert _ALL.keys() >= _ALWAYS
    assert not [name for name in _ALWAYS if _ALL[name].slow]
    assert _VARIANTS.keys() | {*_VARIANTS.values()} <= _ALL.keys()
    assert not _VARIANTS.keys() & {*_VARIANTS.values()}


def test_page_names_each_situation() -> None:
    """The page lists the situations of the folder, none twice."""
    names = pairs.names_on(_PAGE)
    assert sorted(names) == sorted(situation.name for situation in _ALL.values())
    assert len(set(names)) == len(names)
    assert {situation.group for situation in _ALL.values()} <= pairs._GROUPS.keys(), "else the page loses it"


def test_the_table_of_the_page_names_situations() -> None:
    """Each line of what a program can look at has some."""
    table = _PAGE.read_text("utf-8").partition("## What a program can look at")[2].partition("\n## ")[0]
    lines = [line.split("|")[2] for line in table.splitlines() if line.startswith("| ")][1:]
    named = [re.findall(r"`(\w+)`", line) for line in lines]
    assert named
    assert all(named)
    assert {name for names in named for name in names} <= _ALL.keys()


_END = {"status": 0, "out": "losses ['0x1p-3']\n", "err": "", "seconds": 1.0, "left": False}
_SITUATION = pairs.Situation(Path("input_a.py"), "a", {})
_PAIR = pairs.Pair(_SITUATION, [_END], [_END], steps=3)


def _attached(**changes: object) -> pairs.Pair:
    return replace(_PAIR, attached=[{**_END, **changes}])


def _measured(value: int) -> pairs.Pair:
    texts = [f"~ peak MiB {number} 5\n" for number in (90, value)]
    return replace(_PAIR, plain=[{**_END, "out": texts[0]}], attached=[{**_END, "out": texts[1]}])


@pytest.mark.parametrize(
    "pair, words",
    [
        (_attached(status=1), "exit 0 became exit 1"),
        (_attached(status=-11), "exit 0 became SIGSEGV"),
        (_attached(status=None), "exit 0 became no end"),
        (_attached(out="losses ['0x1p-4']\n"), "output \"losses ['0x1p-3']\" became \"losses ['0x1p-4']\""),
        (_attached(out=""), "output lost"),
        (_attached(err="train.py:3: UserWarning: mine\n"), "stderr gained 'train.py:3: UserWarning: mine'"),
        (_attached(left=True), "a process outlived it"),
        (replace(_PAIR, files=(["a.pt 10"], ["a.pt 11"])), "files: ['a.pt 10'] became ['a.pt 11']"),
        (replace(_PAIR, steps=0), "no step was watched"),
        (replace(_PAIR, tree=True, situation=replace(_SITUATION, options={"ranks": "2"})), "the ranks did not talk"),
        (_measured(96), "peak MiB 90 became 96, allowed are 5 more"),
    ],
)
def test_sees_a_difference(pair: pairs.Pair, words: str) -> None:
    """Each kind of difference is seen, and named."""
    assert [text for text in pair.differences if text.startswith(words)], pair.differences


@pytest.mark.parametrize(
    "pair",
    [
        _PAIR,
        _attached(err="ddpdebug: warning RCP801\n  where     step 3\n            rank 1\n"),
        replace(_PAIR, steps=0, situation=replace(_SITUATION, options={"watched": "no, it trains nothing"})),
        _measured(95),
    ],
)
def test_the_same(pair: pairs.Pair) -> None:
    """Our own messages, and measured values within what is allowed, are no difference."""
    assert pair.differences == []


@pytest.mark.jobs
@pytest.mark.parametrize(
    "how", [pytest.param("forked", marks=pytest.mark.smoke), pytest.param("alone", marks=pytest.mark.slow)]
)
def test_a_real_difference_is_seen(how: str, tmp_path: Path) -> None:
    """A script that can tell the two apart is told apart; one that cannot is not."""
    same, other = tmp_path / "exit_same.py", tmp_path / "exit_other.py"
    text = f'"""Words.\n\nrun: {how}\nwatched: no\n"""\nimport sys\n'
    same.write_text(f"{text}print(len(sys.argv))\n")
    other.write_text(f"{text}sys.exit(3 * (sys.modules.get('ddpdebug') is not None))\n")
    found = pairs.run([pairs.read(same), pairs.read(other)])
    assert found["exit_same"].differences == []
    assert found["exit_other"].differences == ["exit 0 became exit 3"]
