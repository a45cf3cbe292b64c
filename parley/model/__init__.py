"""Runs models with torch: loading, KV pages, forward pass, sampling. No package below this one imports torch."""
