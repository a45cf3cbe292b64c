"""One port in front of several servers: which instance answers a request, and what happens when one fails."""
