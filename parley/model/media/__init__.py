"""The encoder of pictures, video and sound: from the processor's tensors of an item to its embeddings."""
