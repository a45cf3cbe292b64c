"""Processes and threads that do slow work outside of the event loop."""
