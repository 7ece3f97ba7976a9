"""The journal: the only truth about a request (docs/architecture.md).

What is stored: `ids`, `facts`, `entries` (the schema), `wakes` (on their way to an ingress).
Who writes: `writer` with one `attempt` for each request (fenced appends; `standing` says who owns
the journal), and `store` (the first entry, and endings without a worker).
Who reads: `followers` with one `follower` and `reader` for each connection; `outline` (a request's
state), `opening` (a worker begins), `events` and `pieces` (response bytes).
"""
