"""MLPerf HPC on the controller's side: logs of recorded runs, their check, time to train and its scaling.

::

    records (source.py) -> one trained run each (trained.py, timeline.py: pure)
        -> lines of a log (entries.py, pure) -> result_N.txt (writing.py) -> the real compliance checker (checking.py)
        -> which rules it departs from, so in which division it belongs (rules.py, limits.py: pure)
        -> groups of repeated runs (groups.py), olympic mean (scoring.py): pure
        -> epochs times epoch time (points.py, predict.py), weak and strong scaling (scaling.py), published results
           (reference.py): pure
        -> sheets (sheets*.py) -> text, Markdown, JSON (render.py)

Runs to a quality target are made by the worker (``until="quality"``); what happened in them are a rank's ``events``.
"""
