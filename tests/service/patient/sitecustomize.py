"""Gives a service under test time. Python loads this file when a process starts, because the tests
name its folder in PYTHONPATH. Leases and calls last PATIENCE times as long as they do in
production, so no pause of a busy machine looks like a death; and engines, the processes that
multiprocessing spawns, have a lower priority than what serves.
"""

import os
import sys

from serve_app import timings

for _name in (
    "LEASE_MS",
    "LEASE_PATIENCE_S",
    "LEASE_STEADY_S",
    "ATTEMPT_OPENS_S",
    "CALL_OPENS_S",
):
    setattr(timings, _name, int(os.environ["PATIENCE"]) * getattr(timings, _name))
if any("multiprocessing.spawn" in argument for argument in sys.orig_argv):
    os.nice(10)
