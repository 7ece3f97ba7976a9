"""HTTP: validate early, admit, answer, report. Owns fastapi.

`app` (routes) → `api_keys`, `connection_limits`, `validation` (refuse early) → `inference` →
`exchange` (submit, follow the journal, forward the bytes) → `sending`, `disconnects` (clients that
read slowly or not at all, or that leave). `objects_api` and `status` are among the other
endpoints.
"""
