"""The networks: the fused decoder, encoders, LoRA, pooling and the paged KV cache that they read."""
