"""Provisioning by a scheduler of jobs: Slurm, and those that a definition describes."""
