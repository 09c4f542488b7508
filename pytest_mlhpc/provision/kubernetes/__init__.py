"""Kubernetes: one workload object for each allocation, whose pods carry one agent each."""
