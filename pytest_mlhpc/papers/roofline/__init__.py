"""The roofline page: each workload against the measured peaks of its device, from recorded runs.

::

    index of records -> recorded_runs.py -> page.py -> text, or one HTML file without scripts
"""
