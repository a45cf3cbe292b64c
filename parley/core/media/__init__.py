"""Embeddings of media items: the queue of sequences that wait for them, their cache, and the thread of the encoder."""
