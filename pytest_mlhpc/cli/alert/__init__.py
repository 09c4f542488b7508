"""``mlhpc alert``: its verbs."""

from pytest_mlhpc.cli.commands import LazyGroup

command = LazyGroup(
    "alert",
    package=__name__,
    summaries={
        "send": "send what is new, worse, over or missing; each of it once",
        "list": "list open alerts and muted systems",
        "ack": "acknowledge an alert until a date, with a reason",
        "mute": "send nothing new of a system until a date",
    },
    help="Alerts: after a nightly run, one message for one cause.",
    example="mlhpc alert send --expect nightly",
)
