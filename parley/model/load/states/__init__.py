"""Layers that keep a state: their weights in checkpoints, and their definition for the numeric check."""
