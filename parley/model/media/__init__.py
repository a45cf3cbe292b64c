"""The encoder of images, video and audio: from the processor's tensors of an item to its embeddings."""
