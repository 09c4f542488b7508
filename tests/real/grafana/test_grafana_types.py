"""Every dashboard against the published types of Grafana, by the TypeScript compiler."""

import copy
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from pytest_mlhpc.report.grafana import all_dashboards

pytestmark = pytest.mark.servers
CHECKED = Path(__file__).resolve().parents[2] / "report/grafana/checked.ts"


@pytest.fixture
def compiled(grafana_schema, tmp_path):
    """Compile dashboards, by the names of their files, and return what the compiler complains of."""
    modules = Path(grafana_schema.environment["MLHPC_GRAFANA_SCHEMA"])

    def compile_all(dashboards):
        (tmp_path / "node_modules").symlink_to(modules)
        shutil.copy(CHECKED, tmp_path)
        for name, dashboard in dashboards.items():
            text = f"import type {{ Checked }} from './checked';\nexport const it: Checked = {json.dumps(dashboard, indent=1)};\n"
            (tmp_path / f"{name.removesuffix('.json')}.ts").write_text(text, encoding="utf-8")
        options = [
            "--noEmit",
            "--strict",
            "--skipLibCheck",
            "--module",
            "esnext",
            "--moduleResolution",
            "bundler",
        ]
        done = subprocess.run(
            ["node", str(modules / "typescript/bin/tsc"), *options, "--target", "es2022", *sorted(map(str, tmp_path.glob("*.ts")))],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600, check=False, cwd=tmp_path,
        )  # fmt: skip
        assert (done.returncode == 0) == (done.stdout == ""), done.stderr
        return done.stdout

    return compile_all


def changed(**changes):
    """A dashboard with one thing changed: ``path__to__field=value``."""
    dashboard = copy.deepcopy(all_dashboards()["mlhpc-benchmark.json"])
    for path, value in changes.items():
        *way, last = (int(word) if word.isdigit() else word for word in path.split("__"))
        at = dashboard
        for word in way:
            at = at[word]
        at[last] = value
    return dashboard


def applied(dashboard):
    """Return a dashboard of which each override of a diagram is the default of a panel: overrides themselves take anything."""
    panels = []
    for panel in dashboard["panels"]:
        for override in panel["fieldConfig"]["overrides"] if panel["type"] == "timeseries" else []:
            changed_panel = copy.deepcopy(panel)
            for one in override["properties"]:
                *way, last = one["id"].split(".")
                at = changed_panel["fieldConfig"]["defaults"]
                for word in way:
                    at = at[word]
                at[last] = one["value"]
            panels.append(changed_panel)
    return {**dashboard, "panels": panels}


LINKS = {name: f"https://example.org/{{{name}}}" for name in ("commit", "job", "pipeline", "report")}


def test_every_dashboard_has_grafana_s_types_and_no_mistake_slips_through(compiled):
    linked = {f"linked-{name}": one for name, one in all_dashboards(LINKS).items()}
    series = applied(all_dashboards()["mlhpc-series.json"])
    assert len(series["panels"]) == 5
    misdrawn = copy.deepcopy(series)
    misdrawn["panels"][0]["fieldConfig"]["defaults"]["custom"]["fillBelow"] = "fence_low"
    linked["overrides.json"] = series
    wrong = {
        "misspelt-override": misdrawn,
        "wrong-threshold": changed(panels__1__fieldConfig__defaults__thresholds__steps__1__value="1"),
        "misspelt-end": changed(annotations__list__0__target__timeEnd="until_ms"),
        "misspelt-field": changed(panels__0__fieldConfig__defaults__custom__drawStile="line"),
        "unknown-choice": changed(panels__0__fieldConfig__defaults__custom__drawStyle="dots"),
        "wrong-type": changed(panels__0__gridPos__w="12"),
        "misspelt-option": changed(panels__0__options__legend__showLegends=True),
        "wrong-variable": changed(templating__list__1__type="querry"),
        "wrong-number": changed(templating__list__1__refresh=7),
        "unknown-panel": changed(panels__0__type="graph"),
        "format-of-answer": changed(panels__0__targets__0__resultFormat="csv"),
    }
    reported = compiled({**all_dashboards(), **linked, **wrong})
    assert {line.split(".ts(")[0] for line in reported.splitlines() if ".ts(" in line} == set(wrong), reported
