"""What `scripts/bench` runs: load on OpenAI endpoints, and an honest account of what it cost.

`options` (the command line) → `systems` (who is measured) → one of `compare` (systems side by
side), `batching` (batchers in front of one), `long_among_short` and `beside_batch` (what short
requests wait for).
All of them use `run` (a load through one of the `batchers`, on a server or on the model of an
engine), `measurement` (the row of a run; `processes` for its CPU) and `report`.
"""
