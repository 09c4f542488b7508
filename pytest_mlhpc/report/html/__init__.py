"""The report: one HTML file of all systems, benchmarks and nights that needs nothing from outside.

::

    source of history -> page_data.py -> Page -> page.py -> one file
                          |
                          +- rows.py: pure

What is judged, counted or compared is so in Python; the scripts in ``parts/`` only show it. ``vendor/uplot`` draws.
"""
