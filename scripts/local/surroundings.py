"""Filters the user's environment for the processes that we start. Standard library only.

A machine that uses vLLM, Ray or a proxy has environment variables for them. Our processes should
behave the same on every machine, so they only get variables that describe the machine and the user,
and those that were passed on purpose.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

NAMES = frozenset(
    """
    PATH HOME USER LOGNAME SHELL LANG LANGUAGE TZ TERM COLUMNS TMPDIR XDG_CACHE_HOME CI
    LD_LIBRARY_PATH SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE CURL_CA_BUNDLE
    PYTHONDONTWRITEBYTECODE PYTHONUNBUFFERED
    HERMES_DATA HERMES_KEEP_SERVICES HERMES_OTHER_VERSION HERMES_TIMES
    """.split()
)
# For GPUs and processors, pip's package indexes, and the source of a user's model.
PREFIXES = ("LC_", "CUDA_", "NVIDIA_", "NCCL_", "OPENBLAS_", "NVPL_", "MKL_", "PIP_", "HF_")


def kept(environment: Mapping[str, str]) -> dict[str, str]:
    """The part of an environment that is passed on."""
    return {
        name: value
        for name, value in environment.items()
        if name in NAMES or name.startswith(PREFIXES)
    }


def leave() -> None:
    """Remove all other variables from this process, and so from everything that it starts."""
    for name in set(os.environ) - set(kept(os.environ)):
        del os.environ[name]
