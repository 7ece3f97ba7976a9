"""Where a request goes: its key, the ring, the load bound (pure), and the adapter to Ray Serve's router."""
