"""Engines turn requests of token ids into output tokens. Start with ``protocol``, which has the base class."""
