"""A clock that chaos can set, in every Python process of the service under test.

If this folder is on `PYTHONPATH`, Python imports this module first. In the folder that
`HERMES_CHAOS_CLOCKS` names, the file `<pid>` contains by how many seconds that process's wall clock
is ahead. Monotonic time is unchanged.
"""

import os
import time

_folder = os.environ.get("HERMES_CHAOS_CLOCKS")
_LOOK_S = 0.5


def _set_apart(folder: str) -> None:
    real_s, real_ns = time.time, time.time_ns
    looked_s, ahead_s = 0.0, 0.0

    def ahead() -> float:
        nonlocal looked_s, ahead_s
        now_s = time.monotonic()
        if now_s - looked_s > _LOOK_S:
            looked_s = now_s
            try:
                with open(f"{folder}/{os.getpid()}") as file:
                    ahead_s = float(file.read())
            except FileNotFoundError:
                ahead_s = 0.0
        return ahead_s

    time.time = lambda: real_s() + ahead()
    time.time_ns = lambda: real_ns() + int(ahead() * 1e9)


if _folder:
    _set_apart(_folder)
