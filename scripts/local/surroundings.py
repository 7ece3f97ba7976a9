"""What of the user's environment reaches the processes that we start; standard library only.

A machine on which vLLM, Ray or a proxy is in use has variables that mean something to them. What we start is the same
on every machine: it gets what describes the machine and the user, and what it is given on purpose.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

NAMES = frozenset(
    """
    PATH HOME USER LOGNAME SHELL LANG LANGUAGE TZ TERM COLUMNS TMPDIR XDG_CACHE_HOME CI
    LD_LIBRARY_PATH SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE CURL_CA_BUNDLE
    PYTHONDONTWRITEBYTECODE PYTHONUNBUFFERED HERMES_DATA HERMES_KEEP_SERVICES
    """.split()
)
# The machine's GPUs and processors, where pip looks, and where a user's own model comes from.
PREFIXES = ("LC_", "CUDA_", "NVIDIA_", "NCCL_", "OPENBLAS_", "NVPL_", "MKL_", "PIP_", "HF_")


def kept(environment: Mapping[str, str]) -> dict[str, str]:
    """The part of an environment that may go on."""
    return {name: value for name, value in environment.items() if name in NAMES or name.startswith(PREFIXES)}


def leave() -> None:
    """This process, and all that it starts from now on, forgets the rest."""
    for name in set(os.environ) - set(kept(os.environ)):
        del os.environ[name]
