"""Parses model output: reasoning, tool calls and channels, by family; renders chat templates."""
