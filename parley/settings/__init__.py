"""What can be set, and how a value is found."""
