"""Decisions without I/O: the order of work, which replica, which session. Pure."""
