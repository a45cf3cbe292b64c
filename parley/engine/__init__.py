"""Engines turn requests of token ids into output tokens. ``protocol`` has the base class; other files, the kinds."""
