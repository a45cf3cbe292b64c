"""A server as part of a cluster: its role, what another instance computes for it, and how results reach a coordinator.

Three words for three things: a *node* is what a server keeps as an instance (role, results, rates; ``node``), a
*member* begins and takes over requests for it (``member``), and by a *peer* its pages are reached (``disagg/kv``).

Knows HTTP exchanges and generations, and imports no torch.
"""
