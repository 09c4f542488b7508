"""``mlhpc screen``: what limits a training program, said in ten lines, from samples of its processes and devices.

``node/telemetry`` takes samples, and its ``hook/`` is put into the program's own Python. Everything here is the
controller's: it reads both (``told.py``, ``trace.py``), makes courses of them (``courses.py``), judges (``judge.py``: pure
functions), and tells (``words.py``, ``page.py``).
"""
