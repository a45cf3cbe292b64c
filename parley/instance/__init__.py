"""A server as part of a cluster: its role, the stages of separated requests, and the results it sends to coordinators.

Terms: the *instance state* is the data that a server keeps as an instance (role, results, rates; ``node``), the
*cluster member* begins and takes over requests (``member``), and a *peer* gives access to KV pages (``disagg/kv``).

Knows HTTP exchanges and generations, and imports no torch.
"""
