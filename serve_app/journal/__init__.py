"""The journal: the only truth about a request (docs/architecture.md).

`entries` (the storage schema) → `store` (admit, read, end) → `writer` and `attempt` (fenced appends) →
`hub` and `reader` (followers) → `events` (server-sent events) → `connection` (raw RESP for the hot paths).
"""
