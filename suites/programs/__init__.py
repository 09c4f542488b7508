"""Programs of a site's own: built, started by MPI, in Python, under torchrun. Each runs where the partition has the feature it requires."""
