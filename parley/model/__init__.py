"""Running a model with torch: loading, the KV pages, the forward pass, the sampler. Torch begins here."""
