"""The workers: each replica owns one engine and works on requests from the journal.

`replica` (what runs, and health) → `execution` (one attempt: journal in, journal out) → `recorder`
(engine outputs become entries) → `vllm_engine` with `resumable`, or `simulated_engine`.
"""
