"""Translates outputs of vLLM into those of the engine. Plain Python, which runs without vLLM."""
