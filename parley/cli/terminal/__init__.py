"""Shared code of the commands that talk to a person at a terminal."""
