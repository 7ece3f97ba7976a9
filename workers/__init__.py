"""The workers: each replica owns one engine and works on requests out of the journal.

`replica` (execute: journal in, journal out) → `recorder` (what the engine says becomes entries) →
`vllm_engine` with `resumable`, or `simulated_engine`.
"""
