"""A server as part of a cluster: its role, what another instance computes for it, and how results reach a coordinator.

Whoever speaks of it has three words: a *node* is what a server keeps as an instance (role, results, rates; ``node``), a
*member* is who begins and takes requests for it (``member``), and a *peer* is how its pages are reached (``parley.kv``).

Knows HTTP exchanges and generations, and imports no torch.
"""
