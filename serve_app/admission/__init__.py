"""From a validated request to an accepted one: limits, idempotency keys, the journal's first
entry.
"""
