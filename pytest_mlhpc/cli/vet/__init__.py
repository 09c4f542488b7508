"""``mlhpc vet``: its verbs."""

from pytest_mlhpc.cli.commands import LazyGroup

EXAMPLE = """\
srun -N8 --ntasks-per-node=1 mlhpc vet quick --need 6 --output vet || exit $?
. vet/env.sh"""

command = LazyGroup(
    "vet",
    package=__name__,
    default="quick",
    summaries={
        "quick": "look at all nodes of a job, below a minute; `quick` may be left out",
        "deep": "minutes, with every pair of nodes, so that slow links have names",
        "history": "what earlier vettings found, and which nodes fail again",
        "drain": "take the unfit nodes of a verdict out of service",
        "undo": "give nodes back that vetting took out of service",
    },
    help="Are these nodes fit for a long run? One process on each node, by srun, vets all of them; alone it looks at this "
    "machine; with --system it has nodes by itself.",
    example=EXAMPLE,
)
