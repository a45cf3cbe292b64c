"""The model types that run on the fused decoder, in ``table.py``, and how each differs from Llama."""
