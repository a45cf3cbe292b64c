"""Translates requests for the engine into those of vLLM. Plain Python, which runs without vLLM."""
