"""The engine process: receives messages, runs the loop and sends outputs."""
