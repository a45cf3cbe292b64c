"""Facts about a server's work, recorded without the names under which an API shows them."""
