"""A server as part of a cluster: its role, the stages of separated requests, and the results it sends to coordinators.

Terms: the *instance state* holds a server's role, results and rates as an instance, the *cluster member* begins and
takes over requests, and a *peer* exchanges KV pages with other instances (``disagg/kv/peer.py``).

Knows HTTP exchanges and generations, and imports no torch.
"""
