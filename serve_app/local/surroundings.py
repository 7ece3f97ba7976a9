"""Filters the user's environment for the processes that we start. Standard library only.

A machine that uses vLLM, Ray or a proxy has environment variables for them. Our processes should
behave the same on every machine, so they only get variables that describe the machine and the user,
and those that were passed on purpose.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

NAMES = frozenset(
    """
    PATH HOME USER LOGNAME SHELL LANG LANGUAGE TZ TERM COLUMNS TMPDIR XDG_CACHE_HOME CI
    LD_LIBRARY_PATH SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE CURL_CA_BUNDLE
    PYTHONDONTWRITEBYTECODE PYTHONUNBUFFERED
    HERMES_DATA HERMES_KEEP_SERVICES HERMES_OTHER_VERSION HERMES_TIMES
    """.split()
)
# For GPUs and processors, and the source of a user's model.
PREFIXES = ("LC_", "CUDA_", "NVIDIA_", "NCCL_", "OPENBLAS_", "NVPL_", "MKL_", "HF_")
PIP_OPTIONS = frozenset(
    """
    cache-dir cert client-cert default-timeout extra-index-url find-links index-url keyring-provider
    no-cache-dir no-index proxy resume-retries retries timeout trusted-host use-deprecated
    use-feature
    """.split()
)
"""Where pip gets packages from, and how. Its other options (`user`, `target`, `no-deps`,
`require-virtualenv`, …) say what is installed and where to, which is not the user's choice here.
"""
_UV = re.compile(
    r"UV_(INDEX|DEFAULT_INDEX|EXTRA_INDEX_URL|FIND_LINKS|NO_INDEX|KEYRING|HTTP_|REQUEST_TIMEOUT|"
    r"INSECURE_HOST|NATIVE_TLS|SYSTEM_CERTS|OFFLINE|CACHE_DIR|NO_CACHE|LINK_MODE|CONCURRENT)"
)
_UV_NAMES = {
    "index-url": "UV_DEFAULT_INDEX",
    "find-links": "UV_FIND_LINKS",
    "cert": "SSL_CERT_FILE",
}
"""pip's options, and how uv is told the same. Not pip's further indexes: uv takes the first index
that has a package, pip the one whose file has the pinned hash.
"""


def kept(environment: Mapping[str, str]) -> dict[str, str]:
    """The part of an environment that is passed on."""
    return {
        name: value
        for name, value in environment.items()
        if name in NAMES or name.startswith(PREFIXES) or name in _PIP_NAMES
    }


def for_packages(python: Path) -> dict[str, str]:
    """The environment in which pip and uv get packages from where the user has told pip to, by
    PIP_* or pip.conf, and install them as they are told by us.

    Args:
        python: an interpreter with pip.
    """
    words = [str(python), "-I", "-m", "pip", "config", "list"]
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PIP_", "UV_")) or name in _PIP_NAMES or _UV.match(name)
    }
    listed = subprocess.run(words, capture_output=True, text=True, check=False, env=own).stdout
    found: dict[str, str] = {}
    for place in ("global", "install", ":env:"):  # a later one takes precedence
        for option, value in re.findall(rf"^{place}\.([\w-]+)=(.+)$", listed, re.MULTILINE):
            if option in PIP_OPTIONS:
                found[option] = " ".join(ast.literal_eval(value).split())
    as_uv = {name: found[option] for option, name in _UV_NAMES.items() if option in found}
    return {
        **{name: value.replace(" ", ",") for name, value in as_uv.items()},
        **own,
        **{_pip_name(option): value for option, value in found.items()},
        "PIP_CONFIG_FILE": os.devnull,  # what counts of the user's files is in the variables
    }


def _pip_name(option: str) -> str:
    return f"PIP_{option.upper().replace('-', '_')}"


_PIP_NAMES = {"PIP_CONFIG_FILE", *map(_pip_name, PIP_OPTIONS)}


def leave() -> None:
    """Remove all other variables from this process, and so from everything that it starts."""
    for name in set(os.environ) - set(kept(os.environ)):
        del os.environ[name]
