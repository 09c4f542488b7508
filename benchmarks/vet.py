"""All figures of vetting: the fault corpus, simulated error rates, times, nodes that are slow, hung or missing, and vetnode.

``python -m benchmarks.vet [PART...]``; ``--long`` prints the comparison by kind and all error rates.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable

from benchmarks import vet_corpus, vet_nodes, vet_simulation, vet_times, vet_vetnode
from benchmarks.report import Row, machine, table

#: How often six nodes are vetted: with torch's child, and without torch.
WITH_TORCH, WITHOUT = 3, 50


def simulation() -> list[Row]:
    """Return the three error rates that have a bound, of the whole table of :mod:`benchmarks.vet_simulation`."""

    def shares(nodes: int, **slow: float) -> vet_simulation.Shares:
        world = vet_simulation.World(nodes, slow=int(bool(slow)), by=slow.get("by", 0.0))
        return vet_simulation.simulate(world, vet_simulation.vet_figures, world.trials(vet_simulation.SCALE))

    good = {nodes: shares(nodes) for nodes in (4, 8, 16, 64, 256)}
    lost = {nodes: one.lost + one.unknown for nodes, one in good.items()}
    text = ", ".join(f"{nodes} nodes {share:.2%}" for nodes, share in lost.items())
    found = [
        Row("simulation: an all-good allocation loses a node", "<= 0.2 %", text, max(lost.values()) <= 0.002)
    ]
    for by, sizes, least in ((0.15, (8, 16, 64), 0.98), (0.08, (16, 64), 0.60)):
        seen = {nodes: shares(nodes, by=by).found for nodes in sizes}
        text = ", ".join(f"of {nodes} {share:.1%}" for nodes, share in seen.items())
        what = f"simulation: one node {by:.0%} slow among >= {min(seen)}: found"
        found.append(Row(what, f">= {least:.0%}", text, min(seen.values()) >= least))
    return found


PARTS: dict[str, Callable[[], list[Row]]] = {
    "corpus": vet_corpus.rows,
    "simulation": simulation,
    "times": vet_times.rows,
    "slowed": lambda: vet_nodes.slowed(WITH_TORCH),
    "repeated": lambda: vet_nodes.repeated(WITHOUT),
    "agents": vet_nodes.reported,
    "troubled": vet_nodes.troubled,
    "vetnode": vet_vetnode.rows,
}


def run(parts: tuple[str, ...] = tuple(PARTS)) -> list[Row]:
    """Take the figures of these parts, one after the other."""
    found: list[Row] = []
    for part in parts:
        rows = PARTS[part]()
        found += rows
        print(f"{part} ({machine().rpartition(', ')[2]}): {'; '.join(row.measured for row in rows)}", file=sys.stderr, flush=True)  # fmt: skip
    return found


#: How many nodes there are, or how many of them are slow, in what a row of the simulation says.
_NODES = re.compile(r"(?:\d+ of )?\d+(?= (?:good )?nodes)")


def by_size(rows: list[Row]) -> str:
    """Return the error rates as a Markdown table: in each row one question, asked of allocations of several sizes."""
    found: dict[str, list[tuple[str, Row]]] = {}
    for row in rows:
        (size,) = _NODES.findall(row.what)
        found.setdefault(_NODES.sub("N", row.what), []).append((size, row))
    lines = ["| what | N | reach | measured |", "|---|---|---|---|"]
    for what, asked in found.items():
        sizes = ", ".join(size for size, _ in asked)
        measured = ", ".join(row.measured for _, row in asked)
        if len({row.measured for _, row in asked}) == 1:
            measured = f"each {asked[0][1].measured}"
        reach = ", ".join(dict.fromkeys(row.reach for _, row in asked))
        lines.append(f"| {what} | {sizes} | {reach} | {measured} |")
    return "\n".join(lines)


def long_tables() -> str:
    """Return the two tables."""
    try:
        compared = vet_vetnode.by_kind()
    except vet_vetnode.NotHereError as error:
        compared = f"vetnode is not on this machine: {error}"
    return (
        f"Measured {machine()}.\n\n## Cases by kind, by both\n\n{compared}\n\n"
        f"## How often the rules are wrong\n\n{by_size(vet_simulation.run())}"
    )


def main() -> int:
    """Print the figures; exit code 1 if one is out of reach."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vet", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default: all)")
    parser.add_argument(
        "--long", action="store_true", help="print the comparison by kind and all error rates"
    )
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if arguments.long:
        print(long_tables())
        return 0
    print(f"Measured {machine()}.\n", flush=True)
    rows = run(tuple(arguments.parts) or tuple(PARTS))
    print(table(rows))
    return 1 if any(row.ok is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
