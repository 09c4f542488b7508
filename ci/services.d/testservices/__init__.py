"""What `ci/services` and the scripts of `ci/services.d` share. Standard library only."""
