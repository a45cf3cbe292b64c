"""What HTTP/1.1 and HTTP/2 share about request heads and timers, and the framing of HTTP/2."""
