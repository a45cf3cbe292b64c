"""Routes of vLLM that read texts as vectors or scores: embeddings, classes, scores of pairs, and Cohere's form."""
