"""The coordinator's other ports: management, metrics and the status page."""
