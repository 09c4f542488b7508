"""Stands for the four places of torch that the hook of screening touches."""

from torch import autograd, profiler  # noqa: F401
