"""Token ids to text and back: tokenizer, detokenizer, stop strings, truncation."""
