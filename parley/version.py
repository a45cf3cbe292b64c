"""The version of parley, which imports nothing."""

__version__ = "0.1.0"
