"""Vetting: are these nodes fit?

    machine -> checks -> agent (one per node) -> leader -> judge -> verdict -> files

``machine.py`` is all that checks read; ``checks/`` look at one node without torch; ``load/`` computes and sends, in a
process that may hang or die; an ``agent`` on each node reports to the ``leader`` on the first, who owns the deadline;
``judge.py`` compares nodes with their peers, floors and history, and is pure.
"""
