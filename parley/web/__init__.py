"""HTTP as any process of parley serves it: ports, connections, exchanges, keys, logs."""
