"""TLS of ports and of connections between instances: its files, contexts made of them, and their replacement."""
