"""Of this checkout alone: the tests of the plug-in use pytest's own fixture for testing plug-ins."""

pytest_plugins = ["pytester"]
