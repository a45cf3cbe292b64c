"""What administrators ask of a running server: adapters, a self-test, a pause, its end, and downloads of models."""
