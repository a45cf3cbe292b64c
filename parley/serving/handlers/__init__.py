"""Handlers of the kinds of routes that do not generate, and the table of all handlers."""
