"""How fast is a volume for training: large files, many small files?

The run's own folder lies on the shared file system under Slurm, in the pod under Kubernetes, and in the state directory on
this machine. Further volumes are those that a partition offers: `features: [volume]`, and in `variables:` of its
environment MLHPC_VOLUME, a folder on it (docs/storage-and-communication.md).
"""

from pytest_mlhpc import storage


@storage()
def test_folder_of_the_run(run, baseline):
    assert run >= baseline


@storage(path="$MLHPC_VOLUME", requires="volume")
def test_volume(run, baseline):
    assert run >= baseline


@storage(nodes=2)
def test_folder_of_the_run_from_two_nodes(run, baseline):
    assert run >= baseline
