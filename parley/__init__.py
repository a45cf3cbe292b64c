"""parley: one LLM inference server that every client already speaks to."""

__version__ = "0.1.0"
