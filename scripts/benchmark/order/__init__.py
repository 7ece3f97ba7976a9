"""The order of work on a real engine: `scripts/bench --order …`.

`arguments` (the command line's words) → `comparison` (the whole of it) → `backlog` (more work
waits than the engine can hold) and `long_among_short` (every slot holds a long generation when
short requests come) → `engine_page` (what vLLM says of itself), `long_answers` (whole texts, to be
compared) → `figures` (medians of the rounds with their spread), `table`.
"""
