"""What stands for a worker of several ranks, and for launchers of third parties; runs where a batch runs."""
