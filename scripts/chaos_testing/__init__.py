"""The implementation of `scripts/chaos`: mixed traffic on a real service while its processes are
killed, and a complete count of the results.

In the order of a run: `parts` (which process is which, what is done to them) → `traffic` (strict
clients that reconnect) → `journals` (what moves, and what is booked, by Redis) → `account` (lost,
duplicated, corrupted; recovery times) → `__main__`. `in_pod` is such clients for a release of the
Helm chart; it breaks nothing itself.
"""
