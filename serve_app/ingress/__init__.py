"""HTTP: validate early, admit, answer, report. Owns fastapi.

`app` (routes) → `api_keys`, `connection_limits`, `validation` (refuse early) → `inference` →
`exchange` (submit, follow the journal, forward the bytes) → `client_connections` (the server's side
of HTTP, and clients that do not read), `disconnects` (those that leave). `objects_api` and `status`
are among the other endpoints.
"""
