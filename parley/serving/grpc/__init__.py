"""The port of Triton's gRPC protocol."""
