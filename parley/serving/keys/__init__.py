"""What API keys may use and have used: limits, reservations, usage, and the changes that they made."""
