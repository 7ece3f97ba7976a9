"""HTTP: validate early, admit, answer, report. Owns fastapi.

`app` (routes) → `api_keys`, `connection_limits`, `validation` (refuse early) → `admission` (journal
and queue) → `answer` (follow the journal, forward the bytes) → `slow_readers`, `disconnects`
(clients that do not read, or that leave). `requests_api` and `status` are the other endpoints.
"""
