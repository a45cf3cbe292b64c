"""Assembles a server from its parts and runs it."""
