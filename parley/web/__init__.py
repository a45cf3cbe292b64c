"""HTTP serving shared by all processes of parley: ports, connections, exchanges, API keys and logs."""
