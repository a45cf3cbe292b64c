"""WebSockets (RFC 6455) over HTTP/1.1: the handshake, the frames, and messages as requests of the application."""
