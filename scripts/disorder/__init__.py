"""What `scripts/chaos` runs: mixed traffic on a real service while its processes are killed, and an honest count.

In the order a run meets the files: `options` → `parts` (which process is which) → `faults` (what befalls them) →
`traffic` (strict clients that reconnect) → `account` (lost, duplicated, corrupted; how soon it went on) → `__main__`.
"""
