"""``mlhpc history``: its verbs."""

from pytest_mlhpc.cli.commands import LazyGroup

command = LazyGroup(
    "history",
    package=__name__,
    default="show",
    summaries={
        "show": "one benchmark over nights; `show` may be left out",
        "changes": "what became slower or faster to stay, since which night, and what else changed there",
        "bisect": "which commit or set-up made a benchmark slower, by paired runs of today",
        "sensitivity": "how small a loss fails its test, and how many tests fail without one",
        "event": "note what was done to a system, so that alerts can name it",
    },
    help="History: the figures of a benchmark over nights, where their level changed, and what was done to systems.",
    example="mlhpc history cosmoflow --since 30d",
)
