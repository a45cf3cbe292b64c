"""Prefill/decode disaggregation: the wire between instances and the transfer of KV pages. Knows no server."""
