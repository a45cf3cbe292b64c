"""Several instances as one server: a coordinator chooses among them, a controller gives them roles. No torch."""
