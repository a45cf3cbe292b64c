"""Triton's API over gRPC: translates messages to the inputs of the HTTP dialect, and its answers to messages.

Needs protobuf, so only code that serves gRPC imports it. Knows no sockets and no semantics of calls: ``control``,
``infer`` and ``sampling`` of the HTTP dialect decide that for both transports.
"""
