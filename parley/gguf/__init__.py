"""Reads GGUF, the format of llama.cpp, and turns the texts of such a file into a model folder. Reads no weights."""
