"""PAYLOAD. Launchers: a run plan and good nodes become an argument vector and an environment, nothing else."""
