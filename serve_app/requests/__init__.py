"""One life of a request: how it is accepted, what is known of it, and how it ends."""
