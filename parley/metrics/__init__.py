"""Facts about a server's work, recorded without any API's names for them."""
