"""Speculative decoding: proposes draft tokens and decides how many are worth computing."""
