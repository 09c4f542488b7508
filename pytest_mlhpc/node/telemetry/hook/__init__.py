"""What stands on PYTHONPATH of a screened program. Nothing of this package imports it."""
