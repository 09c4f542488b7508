"""One module for each kind of device, behind the protocol in ``base``."""
