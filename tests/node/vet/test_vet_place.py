"""Where a process of a vetting stands, by what its launcher has set."""

import os

import pytest

from pytest_mlhpc.node.vet.place import PlaceError, VetPlace, place_of

STEP = {
    "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "4", "SLURM_JOB_NODELIST": "n[1-4]", "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[2-4]", "SLURM_STEP_NUM_NODES": "3", "SLURM_NODEID": "1", "SLURM_LOCALID": "0",
    "SLURM_PROCID": "1", "SLURMD_NODENAME": "n3",
}  # fmt: skip


def test_without_a_launcher_it_is_alone():
    here = os.uname().nodename
    assert place_of({}) == VetPlace(host=here, hosts=(here,))


def test_a_step_of_slurm_tells_everything():
    assert place_of(STEP) == VetPlace(1, 3, "n3", ("n2", "n3", "n4"), ("n2",))


def test_the_second_task_on_a_node_has_nothing_to_do():
    assert place_of({**STEP, "SLURM_LOCALID": "1", "SLURM_PROCID": "4"}).extra


def test_the_batch_script_itself_is_alone_and_says_how_to_vet_all():
    batch = {name: value for name, value in STEP.items() if "STEP" not in name}
    place = place_of({**batch, "SLURM_NODEID": "0", "SLURMD_NODENAME": "n1"})
    assert (place.rank, place.nodes, place.hosts) == (0, 1, ("n1",))
    assert "srun -N4 --ntasks-per-node=1 mlhpc vet" in place.hint


def test_alone_if_the_option_says_so_whatever_the_launcher_says():
    assert place_of(STEP, single=True) == VetPlace(host="n3", hosts=("n3",))


def test_open_mpis_daemons_are_tasks_of_slurm_and_mean_nothing():
    mpi = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    place = place_of({**STEP, **mpi, "SLURM_NODEID": "0"})
    assert (place.rank, place.nodes, place.host) == (2, 3, "n4")


@pytest.mark.parametrize(
    "environ",
    [
        {"PMI_RANK": "1", "PMI_SIZE": "2"},
        {"PMI_SIZE": "2", "PALS_RANKID": "1"},
        {"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2"},
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
        {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "10.0.0.1"},
    ],
)
def test_other_launchers_tell_number_and_size(environ):
    place = place_of(environ)
    assert (place.rank, place.nodes, place.hosts) == (1, 2, ())
    assert place.name_of(0) == "node 0"


def test_several_processes_on_a_node_by_mpi_are_a_usage_error():
    mpi = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    with pytest.raises(PlaceError, match=r"4 processes run on this node .* --map-by ppr:1:node"):
        place_of(mpi)


def test_pods_find_the_first_by_its_address_and_are_called_as_the_caller_says():
    environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1"}
    place = place_of(environ, hosts=("a (node x)", "b (node y)"))
    assert (place.host, place.leaders) == ("b (node y)", ("10.0.0.1",))


def test_variables_of_our_own_come_first():
    own = {"RANK": "0", "NODES": "2", "NODELIST": "a, b", "LEADER": "10.0.0.1:77"}
    environ = STEP | {f"MLHPC_VET_{name}": value for name, value in own.items()}
    assert place_of(environ) == VetPlace(0, 2, "a", ("a", "b"), ("10.0.0.1:77",))


@pytest.mark.parametrize(
    ("rank", "nodes", "names"),
    [
        ("2", "2", ""),
        ("x", "2", ""),
        ("0", "0", ""),
        ("0", "99999999", ""),
        ("-1", "2", ""),
        ("0", "2", "a,a"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(rank, nodes, names):
    with pytest.raises(PlaceError):
        place_of({"MLHPC_VET_RANK": rank, "MLHPC_VET_NODES": nodes, "MLHPC_VET_NODELIST": names})


def test_a_list_of_nodes_that_is_none_is_refused_with_the_reason():
    with pytest.raises(PlaceError, match=r"the nodes of this step are not known: .* runs backwards"):
        place_of({**STEP, "SLURM_STEP_NODELIST": "n[3-1]"})
