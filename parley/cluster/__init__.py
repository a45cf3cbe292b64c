"""One server made of several instances: a coordinator schedules requests, a controller assigns roles. No torch."""
