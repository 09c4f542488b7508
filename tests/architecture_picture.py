"""docs/architecture.svg: the packages in their order, and who imports whom. ``make architecture`` draws it.

An arrow that follows from two others is left out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from graphlib import TopologicalSorter

from house import PACKAGE, ROOT, read_house
from test_import_order import ORDER

PICTURE = ROOT / "docs/architecture.svg"
#: What each is about, in few words; docs/architecture.md says more.
ABOUT = {
    "cli": "commands of mlhpc",
    "plugin": "pytest's hooks",
    "session": "one benchmark session",
    "builtin": "our schedulers, launchers, workloads",
    "hookspecs": "extension points",
    "options": "options of pytest",
    "papers": "reports of published papers",
    "vetting": "nodes over sessions",
    "screen": "what limits a program",
    "provision": "nodes from local, Slurm, Kubernetes",
    "ci": "pipelines and notes",
    "report": "morning page, comparison, HTML",
    "alert": "incidents and messages",
    "influx": "InfluxDB",
    "history": "nights, series, events",
    "judge": "verdicts and baselines",
    "jobs": "declared tests, queue, ledger",
    "config": "systems.yaml",
    "store": "records",
    "node": "all that runs on nodes",
    "errors": "the exception tree",
}
#: Height of a row, and width of the boxes and of the picture, in pixels.
ROW, BOX, WIDTH = 34, 350, 620
_HEAD = (
    '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0 0 8 4 0 8z"/></marker>'
)
_STYLE = """
  text { font: 13px sans-serif; fill: #24292f } .about { fill: #57606a; font-size: 12px }
  rect { fill: #f6f8fa; stroke: #8c959f } path { fill: none; stroke: #0969da; stroke-opacity: .55 }
  marker path { fill: #0969da; stroke: none }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .about { fill: #9198a1 } rect { fill: #151b23; stroke: #3d444d }
    path { stroke: #4493f8 } marker path { fill: #4493f8 }
  }
"""


def arrows(imports: Mapping[str, Iterable[str]]) -> dict[str, set[str]]:
    """Return which packages each imports, those that another one of them imports left out."""
    found: dict[str, set[str]] = {name: set() for name in ORDER}
    for module, others in imports.items():
        for other in others:
            one, another = _package(module), _package(other)
            if one != another and {one, another} <= found.keys():
                found[one].add(another)
    return _reduced(found)


def _package(module: str) -> str:
    return module.removeprefix(f"{PACKAGE}/").partition("/")[0].removesuffix(".py")


def _reduced(direct: Mapping[str, set[str]]) -> dict[str, set[str]]:
    below: dict[str, set[str]] = {}
    for name in TopologicalSorter(direct).static_order():
        below[name] = set(direct[name]).union(*(below[other] for other in direct[name]))
    return {
        name: {one for one in others if not any(one in below[other] for other in others - {one})}
        for name, others in direct.items()
    }


def draw(found: Mapping[str, Iterable[str]]) -> str:
    """Return the picture."""
    places = {name: 20 + ROW * number for number, name in enumerate(ORDER)}
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {ROW * len(ORDER) + 30}" role="img">',
        "<title>Packages of pytest-mlhpc: each imports only what stands below it</title>",
        f"<style>{_STYLE}</style>",
        f"<defs>{_HEAD}</defs>",
    ]
    for name, others in found.items():
        for other in sorted(others, key=ORDER.index):
            top, bottom = places[name] + 15, places[other] + 11
            reach = BOX + 18 + min(bottom - top, 500) * 0.48
            lines.append(
                f'<path d="M{BOX} {top} C{reach:.0f} {top} {reach:.0f} {bottom} {BOX + 2} {bottom}" marker-end="url(#head)"/>'
            )
    for name, place in places.items():
        lines += [
            f'<rect x="10" y="{place}" width="{BOX - 10}" height="26" rx="5"/>',
            f'<text x="20" y="{place + 18}">{name}</text>',
            f'<text class="about" x="105" y="{place + 18}">{ABOUT[name]}</text>',
        ]
    return "\n".join([*lines, "</svg>\n"])


def main() -> int:
    """Write the picture."""
    PICTURE.write_text(draw(arrows(read_house().imports)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
