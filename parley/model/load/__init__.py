"""Loads a model, picks its network, checks it numerically and measures memory."""

from parley.model.load.torchvision_operators import declare_missing_operators

declare_missing_operators()  # before a file of this folder imports Transformers
