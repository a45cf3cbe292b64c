"""The numeric check at load: a network is accepted if its logits agree with those of an independent computation."""
