"""A real Slurm on one machine: slurmctld, six slurmd, munge, and if wanted slurmdbd with MariaDB. Standard library only."""
