"""Scheduling policy: assign tokens of sequences to steps, and KV pages to sequences. Imports neither torch nor the
server."""
