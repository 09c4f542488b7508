"""torchrun as the launcher starts it: what it leaves on a node."""

import pytest
from probe_ranks import sabotaged
from rank_helpers import run_plan

from pytest_mlhpc.node.torchrun import own_folder

#: An agent of torchrun in place of a rank, which starts two ranks of a shell script.
AGENT = """
import os, signal, sys
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from pytest_mlhpc.node.torchrun import main

def interrupted(*_):
    os.kill(os.getpid(), signal.SIGTERM)

if "sleep" in os.environ["SCRIPT"]:
    LocalElasticAgent._monitor_workers = interrupted  # the first act after both ranks have started

sys.argv = ["torchrun", "--nnodes=1", "--nproc_per_node=2", "--max_restarts=0", "--rdzv_backend=c10d",
            "--rdzv_endpoint=localhost:0", "--rdzv_id=run", "--no_python", "sh", "-c", os.environ["SCRIPT"]]
try:
    main()
except BaseException as error:
    print(type(error).__name__, flush=True)
    os._exit(1)
os._exit(0)
"""


@pytest.mark.servers
@pytest.mark.parametrize(
    ("script", "code", "error"),
    [("true", 0, ""), ("exit 3", 1, "ChildFailedError"), ("exec sleep 600", 1, "SignalException")],
    ids=["ended", "failed", "terminated"],
)
def test_nothing_is_left_in_the_folder_of_temporary_files(ranks, tmp_path, script, code, error):
    agent = {**sabotaged(tmp_path, AGENT), "TMPDIR": str(tmp_path), "SCRIPT": script}
    ((found, output),) = ranks(run_plan(), **agent).ended
    assert (found, error in output) == (code, True), output
    assert list(tmp_path.glob("torchelastic_*")) == []


def test_a_folder_that_the_environment_names_stays(tmp_path):
    environment = {"PET_LOG_DIR": str(tmp_path)}
    with own_folder(environment):
        assert environment == {"PET_LOG_DIR": str(tmp_path)}
    assert tmp_path.is_dir()
