"""Tells receivers by HTTP of what has ended: at least once, whatever dies."""
