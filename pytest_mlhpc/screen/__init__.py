"""``mlhpc screen``: what limits a training program, said in ten lines, from samples of its processes and devices.

``node/telemetry`` takes samples, and its ``hook/`` is put into the program's own Python. Everything here is the
controller's: it reads both (``hook_output.py``), makes time series of them (``usage.py``), judges (``limits.py``: pure functions)
and shows (``report.py``).
"""
