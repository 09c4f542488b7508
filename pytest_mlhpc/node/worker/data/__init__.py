"""On-disk formats: readers of real data sets, and writers of synthetic ones in the same formats."""
