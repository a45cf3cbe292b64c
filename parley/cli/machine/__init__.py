"""Commands about this machine: models in its cache, shell completion, installed versions."""
