"""The block pool of the KV cache and the block tables of sequences."""
