"""A new project: what the machine has on which it begins, and the files that ``mlhpc init`` writes."""
