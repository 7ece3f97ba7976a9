"""The workers: each replica owns one engine and works on requests from the journal.

`replica` (health, and attempts: journal in, journal out) → `attempt` (engine outputs become
entries) → `vllm_engine` with `resumable`, or `simulated_engine`. `loop_watch` ends a request that
blocks the event loop, which all requests share.
"""
