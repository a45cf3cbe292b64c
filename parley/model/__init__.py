"""Running a model with torch: loading, the KV pages, the forward pass, the sampler. The only place torch is imported."""
