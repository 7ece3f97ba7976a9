"""HTTP: check early, admit, answer, report. Owns fastapi.

`app` (routes) → `validation` (what can be known before any work) → `admission` (journal and queue) → `answer`
(follow the journal, forward the bytes) → `departures` (clients that leave); `requests_api` and `status` beside.
"""
