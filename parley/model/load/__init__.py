"""Loads a model, picks its network, checks it numerically and measures memory."""
