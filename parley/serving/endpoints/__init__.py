"""Endpoints: names whose requests are split between models, and limits on their use."""
