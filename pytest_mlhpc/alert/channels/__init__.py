"""Ways by which a message leaves: one module each, all with the protocol of ``base.py``."""
