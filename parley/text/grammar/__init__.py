"""Turns response formats (JSON Schema, regex, GBNF, structural tags) into one grammar for llguidance."""
