"""The gRPC port of a coordinator."""
