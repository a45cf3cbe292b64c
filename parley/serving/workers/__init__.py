"""Processes and threads that do slow work beside the event loop."""
