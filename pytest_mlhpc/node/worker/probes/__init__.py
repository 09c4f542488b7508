"""Workloads that are no training: storage, communication, n-body."""
