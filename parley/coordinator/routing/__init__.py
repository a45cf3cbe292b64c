"""Decides which instance computes a request, and how load, prefixes and roles count in that."""
