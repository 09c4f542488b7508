"""The command `mlhpc vet`: the controller's half, which the payload leaves behind."""
