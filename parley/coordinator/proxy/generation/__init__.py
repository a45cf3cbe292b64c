"""Requests that generate: facts for their placement, attempts on instances, and runs without their client."""
