"""Batchers side by side, in front of one endpoint: `scripts/bench --batching …`.

Pure: `job` (what is asked of an engine) → `batcher` (what every batcher is) → `window`, `batches`,
`tuned`, `hybrid`, `split` (the policies) → `specification` (their names) → `arguments` (the command
line's words). With I/O: `comparison` (the whole of it) → `rounds` (who is measured when) → `run`
(one batcher under one load) → `front` (turns a batcher and sends its jobs), `occupancy`, `server`
(memory and CPU), `engine_gauges` (what vLLM says of itself) → `row`, `summary`, `table`, `picture`.
In virtual time: `virtual_rounds` → `virtual_run`.
"""
