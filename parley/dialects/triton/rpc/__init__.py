"""Triton's API over gRPC: messages to what the dialect reads over HTTP, and its answers to messages.

Only who serves gRPC imports this package; it needs protobuf. It knows no sockets, and nothing of what a call means:
that is said once, for both ways in, by ``control``, ``infer`` and ``sampling``.
"""
