"""Reads checkpoint files: safetensors and GGUF, and the storage format of each weight."""
