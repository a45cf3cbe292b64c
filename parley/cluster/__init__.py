"""Many instances as one server: the coordinator, whom it chooses, and where the instances run."""
