"""The documentation says what the code says."""

from __future__ import annotations

import ast
import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

import ddpdebug
from ddpdebug.commands._line import COMMANDS
from ddpdebug.config.settings import Config, options
from ddpdebug.detectors.pages import pages
from ddpdebug.run_directory import reader as run_files
from ddpdebug.schema.row import ROW_BYTES, Row, encode, layout
from tools.documentation import PAGES, main

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
TEXTS = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")), *sorted(DOCS.rglob("*.md"))]
#: Results of measurements: they are there once `make bench` and `make detection` have been run.
_MEASURED = {"overhead.md", "detection.md", "programs.md"}


def anchors(text: str) -> list[str]:
    """Return the anchors of a page's headings, as the usual hosts make them."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    heads = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads]


@pytest.mark.parametrize("name", PAGES)
def test_generated_pages_are_fresh(name: str) -> None:
    """`make docs` would change nothing."""
    assert (DOCS / name).read_text(encoding="utf-8") == PAGES[name](), f"docs/{name} is stale: run `make docs`"


def test_pages_are_written_by_the_names_of_their_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another name is refused before anything is written."""
    assert main([str(tmp_path / "options.md")]) == 0
    assert (tmp_path / "options.md").read_text(encoding="utf-8") == PAGES["options.md"]()
    for files, message in (([str(tmp_path / "x.md")], "no page"), ([], "name the pages to write")):
        assert main(files) == 2
        assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["options.md"]


def test_the_catalogue_is_complete_and_its_anchors_are_unique() -> None:
    """Every code has one section, planned ones say so."""
    text = PAGES["findings.md"]()
    found = anchors(text)
    assert len(found) == len(set(found))
    assert set(re.findall(r"\(#([^)]+)\)", text)) <= set(found)
    for page in pages().values():
        section = text.partition(f"\n### {page.code}\n")[2].partition("\n#")[0]
        assert f"`{page.severity.label}`" in section
        assert page.title in section
        assert ("**planned**" in section) is not page.detected
        assert (len(section.partition("**.")[2]) > 10) is page.detected, "what it costs to leave it"


def test_metrics_are_complete() -> None:
    """Every metric of the endpoint has a line with its labels."""
    text = PAGES["metrics.md"]()
    files = (ROOT / "ddpdebug" / "sinks" / "prometheus").glob("*.py")
    source = "".join(file.read_text(encoding="utf-8") for file in files)
    families = set(re.findall(r'"(ddpdebug_[a-z_]*[a-z])"', source))
    assert len(families) > 8
    missing = [family for family in families if not re.search(rf"`{family}(_total|_bucket|_sum)?`", text)]
    assert missing == []
    assert "| `ddpdebug_phase_seconds_sum` `ddpdebug_phase_seconds_count` | `rank`, `phase` (data, " in text


def test_every_option_is_documented() -> None:
    """By its flag, with its default."""
    text = (DOCS / "options.md").read_text(encoding="utf-8")
    for option in options():
        (line,) = (line for line in text.splitlines() if line.startswith(f"| `{option.flag}` |"))
        default = Config.__dataclass_fields__[option.name].default
        assert default is None or f"`{str(default).lower() if option.switch else default}`" in line


def test_only_options_and_commands_that_exist_are_documented() -> None:
    """A page does not promise what the program refuses."""
    known = {option.flag for option in options()} | {f"--no-{o.flag[2:]}" for o in options() if o.switch}
    for command in COMMANDS:
        group = importlib.import_module(f"ddpdebug.commands.{command}").command
        params = [each for one in (group, *getattr(group, "commands", {}).values()) for each in one.params]
        known |= {name for parameter in params for name in (*parameter.opts, *parameter.secondary_opts)}
    foreign = {
        "--lr",
        "--standalone",
        "--nnodes",
        "--node-rank",
        "--master-addr",
        "--master-port",
        "--pdb",
        "--wait",
        "--max-restarts",
        "--max-tokens",
        "--key-file",
    }
    foreign |= {"--web"}  # of Prometheus
    foreign |= {"--multi", "--num"}  # of `accelerate launch`: --multi_gpu, --num_processes
    foreign |= {"--no-index", "--find-links", "--python-version", "--platform", "--only-binary"}  # of pip
    foreign |= {"--shm-size", "--ipc"}  # of container engines
    foreign |= {"--rounds", "--block", "--learn", "--ways", "--busy", "--first", "--steady"}  # of the benchmark
    foreign |= {"--cost", "--against"}  # of benchmarks/scrapes.py
    foreign |= {"--modules", "--ddp", "--steps"}  # of benchmarks/modules.py
    foreign |= {"--worlds", "--finding", "--meeting", "--talk", "--process"}  # of benchmarks/scale.py
    foreign |= {"--option", "--tree", "--twice"}  # of tests/harm/pairs.py
    foreign |= {"--held-out", "--reveal", "--recorded", "--accept"}  # of tests/detection/score.py
    foreign |= {"--write"}  # of tests/slow/sweep.py
    foreign |= {"--torch", "--python"}  # of tools/compat.py
    for path in TEXTS:
        text = path.read_text(encoding="utf-8")
        if path.name in {"findings.md", "detection.md", "programs.md"}:  # they name the options of other programs
            text = ""
        assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) <= known | foreign, path
        named = re.findall(r"`ddpdebug ([a-z]+)|^(?:\$ )?(?:.*-m )?ddpdebug ([a-z]+) ", text, re.MULTILINE)
        assert {word for words in named for word in words if word} <= {*COMMANDS}, path


def test_the_readme_has_two_screens() -> None:
    """So that it is read."""
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 110


def test_changelog_fragments_are_named_after_issues() -> None:
    """So that a release can sort them."""
    names = [path.name for path in (ROOT / "changelog").iterdir() if path.name != "README.md"]
    assert [name for name in names if not re.fullmatch(r"\d+(\.[a-z]+)?\.(feature|bugfix|doc)\.md", name)] == []


def test_make_targets_that_are_named_exist() -> None:
    """And `make test` is among them."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for path in TEXTS:
        assert set(re.findall(r"`make ([a-z-]+)`", path.read_text(encoding="utf-8"))) <= targets, path
    assert "make test" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_size_of_a_row_is_that_of_its_layout() -> None:
    """Wherever a page says how large a row is."""
    told = {path.name: re.findall(r"\brow has (\d+) bytes", path.read_text(encoding="utf-8")) for path in TEXTS}
    told = {name: sizes for name, sizes in told.items() if sizes}
    assert told.keys() >= {"how-it-works.md", "overhead.md"}
    assert {size for sizes in told.values() for size in sizes} == {str(ROW_BYTES)}


def test_where_things_are_is_true() -> None:
    """Each file of the table of questions exists and holds what one is told to look for."""
    text = (
        (DOCS / "how-it-works.md")
        .read_text(encoding="utf-8")
        .partition("\n## Where is ...?\n")[2]
        .partition("\n## ")[0]
    )
    rows = re.findall(r"^\| [^|]+\? ?[^|]*\| `([^`|]+)` \| `([^`|]+)` \|$", text, re.MULTILINE)
    assert len(rows) == len(text.strip().splitlines()) - 2 == 13
    for file, name in rows:
        assert re.search(rf"\b{re.escape(name)}\b", (ROOT / "ddpdebug" / file).read_text(encoding="utf-8")), (
            file,
            name,
        )
    for file in re.findall(r"`([a-z_/0-9]+\.py)`", text):
        assert (ROOT / "ddpdebug" / file).is_file(), file


def test_links_lead_somewhere() -> None:
    """Files exist, and so do the headings that are linked."""
    for path in TEXTS:
        text = re.sub(r"`[^`\n]*`", "", path.read_text(encoding="utf-8"))
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if target.startswith("https://"):
                continue
            file, _, anchor = target.partition("#")
            other = (path.parent / file) if file else path
            if other.name in _MEASURED and not other.exists():
                continue
            assert other.exists(), f"{path.name} links to {target}"
            assert not anchor or anchor in anchors(other.read_text(encoding="utf-8")), f"{path.name} links to {target}"


@pytest.mark.parametrize("name", ["run-directory.md", "attaching.md", "preflight.md", "preflight_training.md"])
def test_python_examples_parse_and_name_what_exists(name: str) -> None:
    """Public names of ddpdebug and of the readers."""
    text = (DOCS / name).read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                if node.value.id == "ddpdebug":
                    assert node.attr in ddpdebug.__all__
                if node.value.id == "run_files":
                    assert hasattr(run_files, node.attr)


def test_the_row_reader_of_the_docs_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a file whose last row is cut off."""
    text = (DOCS / "run-directory.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(import json.*?)^```", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "run.json").write_text(json.dumps({"layout": layout()}))
    rows = [Row(rank=rank, step=4, loss=0.5) for rank in range(2)]
    (tmp_path / "steps.bin").write_bytes(run_files.steps_header(0) + b"".join(map(encode, rows)) + b"cut")
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {}
    exec(block, scope)
    assert [(row["rank"], row["step"], row["loss"]) for row in scope["rows"]] == [(0, 4, 0.5), (1, 4, 0.5)]
