"""Puts a server together from its parts and runs it."""
