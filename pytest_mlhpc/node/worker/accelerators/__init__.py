"""Kinds of device, behind the protocol ``Accelerator`` of ``node/worker/base.py``, which says what opens each."""
