"""KV pages shared with other processes: leases, reservations, pinned pages and staging."""
