"""From logits to tokens: logits processors, grammar masks, sampling, log-probabilities."""
