"""A server as part of a cluster: its role, what another instance computes for it, and how results reach a coordinator.

Knows HTTP exchanges and generations, not the routes that they come by; nothing here imports torch.
"""
