"""What is shipped: the wheel and the sdist by what they hold, and each installed where nothing else is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from email import message_from_bytes
from pathlib import Path

import pytest
from machine import PATIENCE
from packaging.metadata import Metadata

from ddpdebug._version import __version__

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

_ROOT = Path(__file__).resolve().parent.parent.parent
_NAME = f"ddpdebug-{__version__}"
_JOB = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
generator = torch.Generator().manual_seed(dist.get_rank())
for step in range(12):
    optimizer.zero_grad()
    model(torch.randn(4, 8, generator=generator)).square().mean().backward()
    optimizer.step()
    if step == 6 and dist.get_rank() == 1 and "break" in sys.argv:
        model.module.weight.data[0, 3] += 1
dist.destroy_process_group()
"""


def _run(words: list[str | Path], cwd: Path, status: int = 0) -> str:
    """Run a program as a user would, without what the tests' own interpreter was told; return what it has said."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "DDPDEBUG", "VIRTUAL"))}
    env["OMP_NUM_THREADS"] = "1"
    done = subprocess.run(
        words,
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == status, f"{words} ended with {done.returncode}:\n{done.stdout}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the sdist, and of the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    _run([sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, _ROOT], folder)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def sdist(built: Path) -> Path:
    (found,) = built.glob("*.tar.gz")
    return found


def _sources(folder: str) -> set[str]:
    """Return the files that a folder of the repository has, relative to the root."""
    files = (path for path in (_ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(_ROOT).as_posix() for path in files}


def test_the_wheel_is_the_package(wheel: Path) -> None:
    """Its modules and all their data files, the dashboards and the licence; no tests, no tools."""
    info = f"{_NAME}.dist-info"
    about = {f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")}
    dashboards = {f"ddpdebug/grafana/json/{Path(path).name}" for path in _sources("dashboards")}
    assert set(zipfile.ZipFile(wheel).namelist()) == _sources("ddpdebug") | dashboards | about
    assert wheel.name == f"{_NAME}-py3-none-any.whl"


def test_the_sdist_has_what_builds_and_tests_it(sdist: Path) -> None:
    """The package, its tests, tools and pages."""
    with tarfile.open(sdist) as archive:
        names = {name.removeprefix(f"{_NAME}/") for name in archive.getnames()}
    assert names >= {"pyproject.toml", "README.md", "LICENSE", "Makefile", "constraints.txt", "PKG-INFO"}
    assert names >= set.union(*map(_sources, ("ddpdebug", "dashboards", "docs", "tools", "demo", "deploy")))
    assert not {name for name in names if name.startswith((".git/", ".venv", ".ci"))}


def test_metadata_is_valid_and_true(wheel: Path) -> None:
    """By the rules of the index; every Python that the classifiers name is one that may install it, and no other."""
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(f"{_NAME}.dist-info/METADATA")
        entries = archive.read(f"{_NAME}.dist-info/entry_points.txt").decode()
    metadata = Metadata.from_email(text, validate=True)
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pythons = [name.rpartition(" ")[2] for name in project["classifiers"] if ":: Python :: 3." in name]
    assert metadata.requires_python is not None
    assert [f"3.{minor}" for minor in range(40) if f"3.{minor}.9" in metadata.requires_python][
        : len(pythons)
    ] == pythons
    assert metadata.license_expression == "Apache-2.0"
    assert str(message_from_bytes(text).get_payload()).startswith("# ddpdebug")
    assert "ddpdebug = ddpdebug.commands:main" in entries
    assert "ddpdebug = ddpdebug.pytest_plugin" in entries


@dataclass(frozen=True)
class Environment:
    """A virtual environment in which ddpdebug was installed, and a folder to work in."""

    programs: Path
    work: Path

    def __call__(self, *words: str | Path, status: int = 0) -> str:
        return _run([self.programs / words[0], *words[1:]], self.work, status)


@pytest.fixture(scope="module")
def install(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Path], Environment]]:
    """Make environments with the interpreter of the tests; they are gone afterwards: each has more than a gigabyte."""
    folder = tmp_path_factory.mktemp("environments")

    def made(file: Path) -> Environment:
        place = folder / file.suffix[1:]
        work = place / "work"
        _run([sys.executable, "-m", "venv", place], folder)
        work.mkdir()
        (work / "job.py").write_text(_JOB)
        # torch alone has 2,000 modules to compile: those that are imported are compiled then
        words = ["install", "--quiet", "--no-compile", "--constraint", _ROOT / "constraints.txt"]
        _run([place / "bin" / "python", "-m", "pip", *words, f"ddpdebug[hub] @ {file.as_uri()}"], work)
        return Environment(place / "bin", work)

    yield made
    shutil.rmtree(folder)


def _works(installed: Environment) -> None:
    """Nothing is missing, every way in answers, and a job of two ranks is judged rightly."""
    installed("python", "-m", "pip", "check")
    assert installed("ddpdebug", "--version").strip() == f"ddpdebug {__version__}"
    place = installed("python", "-c", "import ddpdebug; print(ddpdebug.__file__)").strip()
    assert Path(place).is_relative_to(installed.programs.parent)
    assert "parameters differ between ranks" in installed("ddpdebug", "explain", "RANK101")
    doctor = installed("ddpdebug", "doctor")
    assert "all restored" in doctor, doctor
    assert "\noff: " not in doctor, doctor
    assert "Serve the hub" in installed("ddpdebug", "hub", "--help")
    check = ("ddpdebug", "check", "--nproc-per-node", "2", "job.py")
    assert "verdict: clean" in installed(*check)
    found = installed(*check, "break", status=1)
    assert "RANK101" in found
    assert "step 7 · rank" in found


def test_the_wheel_works(install: Callable[[Path], Environment], wheel: Path) -> None:
    """Where nothing but what it asks for is; and the demo finds what it has broken."""
    installed = install(wheel)
    _works(installed)
    assert "Both faults were found" in installed("python", _ROOT / "demo" / "demo.py")


@pytest.mark.thorough  # the wheel was built from it
def test_the_sdist_works(install: Callable[[Path], Environment], sdist: Path) -> None:
    """As the wheel that is built from it on installing."""
    _works(install(sdist))
