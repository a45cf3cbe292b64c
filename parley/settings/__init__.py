"""Options and the values that they accept."""
