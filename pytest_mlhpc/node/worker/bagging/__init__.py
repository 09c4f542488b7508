"""Ensembles of independent base models, each on devices and a bootstrap sample of its own (HPC AI500)."""
