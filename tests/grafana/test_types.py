"""The dashboards against the types that Grafana publishes for each version, as its own code is compiled with them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddpdebug.grafana.dashboards import NAMES, shipped

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("npm") is None, reason="the types are a package of npm's"),
]
_PACKAGE = "@grafana/schema"
#: Enumerations are texts in a file. What Prometheus asks for an annotation is its data source's own.
_HEAD = """
import type { AnnotationQuery, Dashboard, Panel, RowPanel } from "@grafana/schema";
type Json<T> = T extends string ? `${T}` : T extends (infer U)[] ? Json<U>[]
  : T extends object ? { [K in keyof T]: Json<T[K]> } : T;
type Prometheus = { expr: string; step: string; titleFormat: string; textFormat: string; tagKeys: string;
  useValueForTime: boolean };
"""


def _panels(panels: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for panel in panels:
        yield panel
        yield from _panels(panel.get("panels", []))


def _constants(dashboard: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield each part with the type that it must have; a type's own fields and no others."""
    yield "Json<Dashboard>", {**dashboard, "panels": [], "annotations": {}}
    for annotation in dashboard["annotations"].get("list", ()):
        yield "Json<AnnotationQuery> & Prometheus", annotation
    for panel in _panels(dashboard["panels"]):
        if panel["type"] == "row":
            yield "Json<RowPanel>", {**panel, "panels": []}
            continue
        kind = panel["type"].replace("-", "")
        yield "Json<Panel>", panel
        yield f"Json<Partial<{kind}.Options>>", panel["options"]
        if custom := panel["fieldConfig"]["defaults"].get("custom"):
            yield f"Json<Partial<{kind}.FieldConfig>>", custom


def _program(dashboards: list[dict[str, Any]], types: Path) -> str:
    constants = [each for dashboard in dashboards for each in _constants(dashboard)]
    lines = [f"export const c{n}: {kind} = {json.dumps(value)};" for n, (kind, value) in enumerate(constants)]
    for kind in sorted({match[1] for line in lines if (match := re.search(r"(\w+)\.Options", line))}):
        file = min(types.glob(f"*/raw/composable/{kind}/panelcfg/x/*types.gen.d.ts"))
        lines.insert(0, f'import type * as {kind} from "{file.with_suffix("").with_suffix("").as_posix()}";')
    return _HEAD + "\n".join(lines)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("version", ["11.6.9", "12.4.11", "13.2.3"])
def test_a_dashboard_has_the_types_of_that_version(version: str, tmp_path: Path) -> None:
    """Every panel, option, variable and annotation is what that Grafana knows, with nothing that it does not know."""
    wanted = [f"{_PACKAGE}@{version}", "typescript@5.9.3"]
    subprocess.run(["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", tmp_path, *wanted], check=True)
    compiler = ["node_modules/.bin/tsc", "--noEmit", "--strict", "--skipLibCheck", "--moduleResolution", "node"]

    def complaints(dashboards: list[dict[str, Any]]) -> str:
        (tmp_path / "all.ts").write_text(_program(dashboards, tmp_path / "node_modules" / _PACKAGE / "dist"), "utf-8")
        made = subprocess.run([*compiler, "all.ts"], cwd=tmp_path, capture_output=True, text=True, check=False)
        return made.stdout

    dashboards = list(shipped().values())
    assert len(dashboards) == len(NAMES)
    assert complaints(dashboards) == ""
    next(p for p in _panels(dashboards[0]["panels"]) if p["type"] != "row")["options"]["colour"] = "red"
    assert "colour" in complaints(dashboards)
