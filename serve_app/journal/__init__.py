"""The journal: the only truth about a request (docs/architecture.md).

What is stored: `entries` (the schema, and wake-ups). Who writes: `workers/journal_writer` with one
`attempt_log` for each request (fenced appends), and `requests/lifecycle` (the first entry, and the
end). Who reads: `ingress/followers` with a `reader` for each connection; `requests/store` (a
request's state, all of a journal), `events` (response bytes), `ledger` (what requests have used).
"""
