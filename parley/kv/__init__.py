"""KV pages on their way from one instance to another. ``peer`` is where to begin; engines and HTTP are unknown here."""
