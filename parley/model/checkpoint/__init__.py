"""Reads checkpoint files: safetensors, quantization formats and how each weight is stored."""
