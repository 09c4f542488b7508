"""The report: one HTML file of all systems, benchmarks and nights that needs nothing from outside.

::

    Source -> gather.py -> Page (model.py) -> encode.py -> page.py -> one file
                |
                +- rows.py (baseline band, change points), overview.py, split.py, scaling.py, hosts.py: pure

What is judged, counted or compared is so in Python; the scripts in ``parts/`` only show it. ``vendor/uplot`` draws.
"""
