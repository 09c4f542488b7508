"""The roofline page: each workload against the measured peaks of its device, from recorded runs.

::

    Index -> gather.py -> Page (model.py) -> text.py (terminal)
                                          -> chart.py, page.py (one HTML file without scripts)
"""
