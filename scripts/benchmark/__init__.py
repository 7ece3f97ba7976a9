"""What `scripts/bench` runs: load on OpenAI endpoints, and an honest account of what it cost.

In the order a run meets the files: `arguments` and `options` (the command line) → `systems` (who is
measured; `peer_venv` and `children` start them, `interrupts` ends them early) → `rounds` (who is
measured when) → `load`, `prompts`, `pool`, `connection`, `sse` (one run) → `measurement`,
`processes` (one row) → `stats`, `comparison`, `cost_model` → `table`, `report`, `plot`. With
`--batching`, the package `batching` compares batchers in front of one system.
"""
