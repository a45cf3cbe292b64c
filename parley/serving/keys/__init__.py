"""Limits, reservations and usage of API keys, and the log of changes that they made."""
