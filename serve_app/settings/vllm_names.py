"""Which of vLLM's arguments and variables mean something here, and why the others do not.

Only vLLM's engine and its request handlers run in a worker: no HTTP server, no launcher, and no
second machine. The chart asks here through helm/hermes-serve/files/settings.json.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

DATA = Path(__file__).with_name("vllm.json")
VLLM: Mapping[str, Any] = json.loads(DATA.read_text())
"""What the pinned vLLM's server takes, written by `python -m scripts.vllm_schema`: the `arguments`
of its parser; the fields of its `requests`, with their JSON Schemas; and by path, the fields of
OpenAI's that it does not know (`without_effect`).
"""

SERVER = (
    "belongs to vLLM's own HTTP server, which does not run here: remove it; the address is Ray "
    "Serve's (http_options), and TLS and CORS are a proxy's"
)
_KEYS = (
    "belongs to vLLM's own HTTP server: remove it, and ask for API keys with `auth` (hermes-serve "
    "api-key makes them)"
)
_ENGINES = "is for engines that several servers share: remove it, and set workers.replicas"
ADAPTERS = (
    "would load an adapter that no request can ask for, because the service knows model.name "
    "alone: remove it, and serve a model with the adapter merged into it"
)
_OWNED = {
    "allowed_media_domains": "limits.media_domains",
    "max_logprobs": "limits.max_logprobs",
    "max_num_seqs": "workers.max_running_requests",
    "model": "model.source",
    "model_tag": "model.source",
    "otlp_traces_endpoint": "telemetry.traces_endpoint",
    "served_model_name": "model.name",
    "sse_keep_alive_interval": "ingress.heartbeat_s",
    "tensor_parallel_size": "workers.tensor_parallel_size",
}
_SERVERS = """
    allow_credentials allowed_headers allowed_methods allowed_origins
    disable_access_log_for_endpoints disable_fastapi_docs disable_uvicorn_access_log
    enable_offline_docs enable_request_id_headers enable_scale_out enable_server_load_tracking
    enable_ssl_refresh enable_tokenizer_info_endpoint grpc grpc_port h11_max_header_count
    h11_max_incomplete_event_size host middleware port root_path ssl_ca_certs ssl_cert_reqs
    ssl_certfile ssl_ciphers ssl_keyfile tokens_only uds uvicorn_log_level
"""
_OF_ENGINES = """
    api_server_count data_parallel_external_lb data_parallel_hybrid_lb
    data_parallel_multi_port_external_lb data_parallel_rank data_parallel_start_rank
    data_parallel_supervisor_port dp_supervisor_probe_failure_threshold
    dp_supervisor_probe_interval_s dp_supervisor_probe_timeout_s headless master_addr master_port
    nnodes node_rank
"""
WITHOUT_MEANING: Mapping[str, str] = {
    **{name: f"is set by {own}: remove it and set {own}" for name, own in _OWNED.items()},
    **dict.fromkeys(_SERVERS.split(), SERVER),
    **dict.fromkeys(_OF_ENGINES.split(), _ENGINES),
    "api_key": _KEYS,
    "config": "names a file of further arguments, which nobody would check: write them here",
    "help": "is no setting: remove it",
    "lora_modules": ADAPTERS,
}
"""The rest of a sentence that begins with the argument, for each argument to refuse."""
WITH_MEANING = frozenset(VLLM["arguments"]) - WITHOUT_MEANING.keys()

_DP = "VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE"
HARMFUL_VARIABLES = {"VLLM_API_KEY": _KEYS, **dict.fromkeys(_DP.split(), _ENGINES)}
"""Variables of the environment that promise keys nobody would ask for, or servers that an engine
would wait for.
"""

TEMPLATE = r"^/|[{}\n]|^template_\w+\.jinja$"
"""A file by its full path, the text itself as vLLM tells it from a file, or a file of vLLM's."""
NO_TEMPLATE = "takes the full path of a file, or the text of the template itself"


def argument_problem(name: str, value: Any = None) -> str:
    """What is wrong with setting an argument of vLLM, as the rest of a sentence that begins with
    it; empty if nothing is.
    """
    plain = name.replace("-", "_")
    if plain in WITHOUT_MEANING:
        return WITHOUT_MEANING[plain]
    if plain not in WITH_MEANING:
        near = difflib.get_close_matches(plain, sorted(WITH_MEANING), 1)
        return "is no argument of vLLM: " + (f"did you mean '{near[0]}'?" if near else "remove it")
    if value is None:
        return ""
    if plain in ("data_parallel_size", "data_parallel_size_local") and str(value) != "1":
        return _ENGINES
    if plain == "gpu_memory_utilization" and not _is_share(value):
        return "takes a share above 0 and up to 1: 90 % is 0.9"
    if plain == "chat_template" and not (isinstance(value, str) and re.search(TEMPLATE, value)):
        return NO_TEMPLATE
    return ""


def _is_share(value: Any) -> bool:
    try:
        return not isinstance(value, bool) and 0 < float(value) <= 1
    except (TypeError, ValueError):
        return False


def variables_problem(names: Iterable[str]) -> str:
    """The sentence about the first variable that must not be set; empty if there is none."""
    wrong = next((name for name in names if name in HARMFUL_VARIABLES), "")
    return wrong and f"the variable {wrong} {HARMFUL_VARIABLES[wrong]}"
