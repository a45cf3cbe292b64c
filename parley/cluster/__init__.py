"""Several instances as one server: a coordinator chooses among them, a controller looks after them. No torch."""
