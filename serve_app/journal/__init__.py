"""The journal: the only truth about a request (docs/architecture.md).

What is stored: `ids`, `facts`, `entries` (the schema, and wake-ups).
Who writes: `writer` with one `attempt` for each request (fenced appends), and `store` (the first
entry, and endings without a worker); `finish` has their commands.
Who reads: `followers` with a `reader` for each connection; `store` (a request's state, all of a
journal), `events` (response bytes).
"""
