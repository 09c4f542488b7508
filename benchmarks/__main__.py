"""Run the benchmark scripts one after the other and print one table for each."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from pathlib import Path

from benchmarks.report import HEAD, line, machine, table

#: Script -> its heading in the report.
SCRIPTS = {
    "plugin_load": "Loading the plug-in",
    "command_jobs": "What a trivial test costs",
    "slots": "48 one-second jobs in 16 slots",
    "start": "A short run beyond its own steps",
    "busy": "Trainings beside other work",
    "measuring_cost": "What measuring costs",
    "loop_against_plain": "Our loop against the plainest correct loop",
    "training": "Training from files, against the HPDC'24 method and against data on the device",
    "record_memory": "Memory of the harness with 2,000 records",
    "large_store": "Five years of records",
    "slowdown": "A slowed workload is found",
    "slurm": "Slurm, on a real cluster of `ci/slurm`",
    "vet": "Vetting",
    "vet_own_history": "One machine's own figures over 20 vettings",
    "vet_simulation": "How often vetting is wrong (simulation)",
    "screening": "Screening and telemetry",
    "bagging": "Bagging against as many bare runs",
    "influx": "InfluxDB, a real server of `ci/services`",
    "history": "Change points over nights (simulation, labelled series)",
    "verdicts": "The verdict of the morning on real noise",
    "against": "A against B, simulated and on a real cluster of `ci/slurm`",
    "bisect": "Which commit made a loss: `mlhpc history bisect`, simulated",
    "sensitivity": "What `mlhpc history sensitivity` predicts, on real noise",
    "kubernetes": "Kubernetes, on a real cluster of `ci/kubernetes`",
    "report_page": "The report, 288 rows and 200,000 figures in Chromium",
}

START, END = "<!-- figures: start -->", "<!-- figures: end -->"


def main() -> int:
    """Print the figures; with --write, put them between the markers of a Markdown file as well."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("names", nargs="*", choices=[*SCRIPTS, []], help="scripts to run (default: all)")
    parser.add_argument("--write", type=Path, metavar="FILE", help="replace the figures in FILE")
    parser.add_argument(
        "--noise", type=Path, metavar="FOLDER", help="series of real noise, for verdicts and sensitivity"
    )
    parser.add_argument("--quick", action="store_true", help="of verdicts: fewer series and smaller sites")
    arguments = parser.parse_args()
    names = arguments.names or list(SCRIPTS)
    parts = [f"Measured {machine()}."]
    print(parts[0], flush=True)
    failed = 0
    for name in names:
        begin = time.monotonic()
        options = {"noise": arguments.noise} if name in {"verdicts", "sensitivity"} else {}
        options |= {"quick": arguments.quick} if name == "verdicts" else {}
        print("", f"## {SCRIPTS[name]}", "", *HEAD, sep="\n", flush=True)
        rows = []
        for row in importlib.import_module(f"benchmarks.{name}").run(**options):
            rows.append(row)
            print(line(row), flush=True)
        parts.append(f"## {SCRIPTS[name]}\n\n{table(rows)}")
        print(f"({time.monotonic() - begin:.0f} s)", flush=True)
        failed += sum(row.ok is False for row in rows)
    if arguments.write:
        text = arguments.write.read_text()
        before, _, rest = text.partition(START)
        _, _, after = rest.partition(END)
        arguments.write.write_text(f"{before}{START}\n" + "\n\n".join(parts) + f"\n{END}{after}")
    if failed:
        print(f"\n{failed} figure(s) out of reach", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
