"""Embeddings of media items: which sequences wait for them, which are kept, and the thread that computes them."""
