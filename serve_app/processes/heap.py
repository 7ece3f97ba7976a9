"""Takes what a process needs for as long as it runs out of Python's garbage collection."""

from __future__ import annotations

import gc


def freeze_heap() -> None:
    """Collect the garbage of the start, and never look again at what is left.

    A full collection looks at every object that the process holds, and the event loop stands still
    meanwhile: some 0.4 s in a worker, which holds 680,000 objects once vLLM is imported. After this
    call it looks only at what has been created since.
    """
    gc.collect()
    gc.freeze()
