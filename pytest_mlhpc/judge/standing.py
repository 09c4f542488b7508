"""How the series of a session stand to what is accepted, and the one line that says so. Pure."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from pytest_mlhpc.judge.judge import accept_command
from pytest_mlhpc.store.verdict import Judgement, Verdict


class Standing(enum.Enum):
    """What a judged figure that ended well has to do with the baseline files."""

    NEW = "new"
    CHANGED = "changed"  #: new, as what is computed is another than before
    PROVISIONAL = "provisional"  #: judged by a provisional baseline of this machine
    WRITTEN = "written"  #: accepted by ``--mlhpc-baseline=update``
    AGREES = "agrees"  #: with its accepted baseline


#: What waits to be accepted.
WAITING = frozenset({Standing.NEW, Standing.CHANGED, Standing.PROVISIONAL})
#: Changes that the line names; the rest is counted.
_MOST = 3

#: (node id, metric) -> how it stands.
Standings = Mapping[tuple[str, str], Standing]

_WELL = frozenset({Verdict.PASSED, Verdict.IMPROVED, Verdict.INCONCLUSIVE})


def standings_of(
    node_id: str, judgement: Judgement, accepted: Collection[str], *, update: bool
) -> dict[tuple[str, str], Standing]:
    """Return how the metrics of one run stand; those of *accepted* had an accepted baseline before it.

    Nothing of a run that failed waits to be accepted: the whole run would be.
    """
    if not update and judgement.verdict not in {*_WELL, Verdict.NEW}:
        return {}
    found = {}
    for metric in judgement.metrics:
        if metric.verdict is Verdict.NEW:
            new = Standing.CHANGED if judgement.epoch else Standing.NEW
            found[node_id, metric.name] = Standing.WRITTEN if update else new
        elif metric.verdict in _WELL:
            agrees = metric.name in accepted
            found[node_id, metric.name] = Standing.AGREES if agrees else Standing.PROVISIONAL
    return found


def recorded_line(
    standings: Standings, epochs: Mapping[str, str], session: str, options: Sequence[str], *, apart: bool
) -> str:
    """Return what of a session waits to be accepted, and how; empty if nothing does.

    *epochs* has what changed of tests (by node id) that began a new epoch. What was measured *apart*, with other settings or on each node by itself, is no baseline for others.
    """
    counts = Counter(standings.values())
    waiting = [node_id for (node_id, _), one in standings.items() if one in WAITING]
    if not waiting:
        return ""
    new, provisional = counts[Standing.NEW], counts[Standing.PROVISIONAL]
    words = [f"{new} new series recorded"] * bool(new)
    if changed := counts[Standing.CHANGED]:
        begin = "begins" if changed == 1 else "begin"
        words.append(
            f"{changed} series {begin} a new epoch, not compared with earlier ones ({_changes(epochs)})"
        )
    words += [f"{provisional} series judged by provisional baselines of this machine"] * bool(provisional)
    target = waiting[0] if len(set(waiting)) == 1 else session
    return ", ".join(words) + ("" if apart else f"; to accept: {accept_command(target, options)}")


def _changes(epochs: Mapping[str, str]) -> str:
    """Return what changed, of tests together of which the same did."""
    tests: dict[str, list[str]] = {}
    for node_id, what in epochs.items():
        tests.setdefault(what, []).append(node_id)
    told = [
        f"{nodes[0].rpartition('::')[2] if len(nodes) == 1 else f'{len(nodes)} tests'}: {what}"
        for what, nodes in tests.items()
    ]
    more = len(told) - _MOST
    return "; ".join(told[:_MOST]) + (f"; and {more} more changes" if more > 0 else "")


def written_line(standings: Standings, epochs: Mapping[str, str], files: Sequence[str]) -> str:
    """Return what ``--mlhpc-baseline=update`` wrote to which *files*, or why nothing; of which tests an epoch began."""
    counts = Counter(standings.values())
    agree = f"{counts[Standing.AGREES]} series agree with their baselines, which stay as they are"
    if files:
        written = f"baselines of {counts[Standing.WRITTEN]} series written to {', '.join(files)}"
        written += f"; new epochs begin: {_changes(epochs)}" if epochs else ""
        return f"{written}; {agree}" if counts[Standing.AGREES] else written
    return f"no baseline written: {agree if counts[Standing.AGREES] else 'no test gave a figure to accept'}"
