"""Requests of administrators: adapters, a self-test, a pause, the end of the server, and downloads of models."""
