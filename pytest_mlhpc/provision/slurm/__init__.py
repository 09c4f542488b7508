"""Nodes of a Slurm cluster: one job for each allocation, one poller for all of a system."""
