"""Modules of a third party that travel with the payload."""
