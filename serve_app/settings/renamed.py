"""Former names of settings, which are accepted for one release. Pure but for the log."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from typing import Any

log = logging.getLogger("hermes.settings")

RENAMED = {
    "workers": {
        "held_s": "max_event_loop_block_s",
        "stall_s": "engine_stall_timeout_s",
        "rerun_tokens": "max_regenerated_tokens",
    },
    "ingress": {
        "stalled_reader_s": "stalled_client_timeout_s",
        "detached_timeout_s": "background_timeout_s",
        "max_upload_bytes": "max_buffered_request_bytes",
        "max_unread_bytes": "max_buffered_response_bytes",
    },
    "journal": {
        "detached_retention_s": "background_retention_s",
        "max_kept_share": "max_retained_share",
        "ledger_days": "usage_retention_days",
    },
    "limits": {
        "max_choices": "max_structured_choices",
        "max_choice_chars": "max_structured_choice_chars",
    },
    "order": {"short_first_ms_per_token": "short_first_ms_per_cost"},
    "queue": {"poison_after": "max_engine_deaths"},
}
"""By section: the former name and the one that replaces it. Removed in the next release."""


def by_new_names(args: Mapping[str, Any]) -> dict[str, Any]:
    """The settings under their names of today. A former name is logged once in a process.

    Raises:
        ValueError: a setting is given by both names; the message names the one to keep.
    """
    named = dict(args)
    for section, names in RENAMED.items():
        given = args.get(section)
        if not isinstance(given, Mapping):
            continue
        for old in names.keys() & given.keys():
            if names[old] in given:
                raise ValueError(
                    f"{section}.{old} is the former name of {section}.{names[old]}, and both are "
                    f"set: remove {section}.{old}"
                )
            _warn(f"{section}.{old}", f"{section}.{names[old]}")
        named[section] = {names.get(key, key): value for key, value in given.items()}
    return named


@cache
def _warn(old: str, new: str) -> None:
    log.warning("settings: %s is deprecated; use %s, which replaces it", old, new)
