"""MLPerf HPC on the controller's side: logs of recorded runs, their check, time to train and its scaling.

::

    records -> trained runs (trained.py) -> result_N.txt and the real compliance checker (logs.py)
            -> which rules a run departs from, and so its division (rules.py)
            -> groups of repeated runs with their olympic mean, published results (results.py)
            -> epochs times epoch time, weak and strong scaling (predict.py)
            -> sheets as text, Markdown, JSON (sheets.py)

Runs to a quality target are made by the worker (``until="quality"``); what happened in them are a rank's ``events``.
"""
