"""Which of vLLM's arguments and variables mean something here, and why the others do not.

Only vLLM's engine and its request handlers run in a worker: no HTTP server, no launcher, and no
second machine. Whoever reads settings asks here: the service, quickstart, `deploy`, and the
chart through helm/hermes-serve/files/settings.json, which helm/schema.py writes.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any

_SERVER = "belongs to vLLM's own HTTP server, which does not run here"
_ADDRESS = f"{_SERVER}: remove it; the address is Ray Serve's (http_options)"
_KEYS = f"{_SERVER}: remove it, and ask for API keys with `auth` (hermes-serve api-key makes them)"
_TLS = f"{_SERVER}: remove it, and let a proxy in front of the service speak TLS"
_PROXY = f"{_SERVER}: remove it, and let a proxy in front of the service do this"
_NOTHING = f"{_SERVER}: remove it"
_ENGINES = "is for engines that several servers share: remove it, and set workers.replicas"
_ADAPTERS = (
    "would load an adapter that no request can ask for, because the service knows model.name "
    "alone: remove it, and serve a model with the adapter merged into it"
)


def _owned(setting: str) -> str:
    return f"is set by {setting}: remove it and set {setting}"


WITHOUT_MEANING: Mapping[str, str] = {
    "allowed_media_domains": _owned("limits.media_domains"),
    "max_logprobs": _owned("limits.max_logprobs"),
    "max_num_seqs": _owned("workers.max_running_requests"),
    "model": _owned("model.source"),
    "model_tag": _owned("model.source"),
    "otlp_traces_endpoint": _owned("telemetry.traces_endpoint"),
    "served_model_name": _owned("model.name"),
    "sse_keep_alive_interval": _owned("ingress.heartbeat_s"),
    "tensor_parallel_size": _owned("workers.tensor_parallel_size"),
    **dict.fromkeys(("grpc", "grpc_port", "host", "port", "root_path", "uds"), _ADDRESS),
    "api_key": _KEYS,
    **dict.fromkeys(
        """enable_ssl_refresh ssl_ca_certs ssl_cert_reqs ssl_certfile ssl_ciphers
        ssl_keyfile""".split(),
        _TLS,
    ),
    **dict.fromkeys(
        "allow_credentials allowed_headers allowed_methods allowed_origins middleware".split(),
        _PROXY,
    ),
    **dict.fromkeys(
        """disable_access_log_for_endpoints disable_fastapi_docs disable_uvicorn_access_log
        enable_offline_docs enable_request_id_headers enable_scale_out enable_server_load_tracking
        enable_tokenizer_info_endpoint h11_max_header_count h11_max_incomplete_event_size
        tokens_only uvicorn_log_level""".split(),
        _NOTHING,
    ),
    "config": "names a file of further arguments, which nobody would check: write them here",
    "help": "is no setting: remove it",
    **dict.fromkeys(
        """api_server_count data_parallel_external_lb data_parallel_hybrid_lb
        data_parallel_multi_port_external_lb data_parallel_rank data_parallel_start_rank
        data_parallel_supervisor_port dp_supervisor_probe_failure_threshold
        dp_supervisor_probe_interval_s dp_supervisor_probe_timeout_s headless master_addr
        master_port nnodes node_rank""".split(),
        _ENGINES,
    ),
    "lora_modules": _ADAPTERS,
}
"""The rest of a sentence that begins with the argument, for each argument to refuse."""

HARMFUL_VARIABLES: Mapping[str, str] = {
    "VLLM_API_KEY": _KEYS,
    **dict.fromkeys(
        """VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT VLLM_DP_RANK VLLM_DP_RANK_LOCAL
        VLLM_DP_SIZE""".split(),
        _ENGINES,
    ),
}
"""The same for variables of the environment: keys that nobody would ask for, and servers that an
engine would wait for.
"""

VARIABLES: Mapping[str, str] = {
    **HARMFUL_VARIABLES,
    "VLLM_PORT": "is not the port of the service, but where vLLM looks for ports for itself: "
    "remove it; the address is Ray Serve's (http_options)",
    **dict.fromkeys(
        """VLLM_DEBUG_LOG_API_SERVER_RESPONSE VLLM_HTTP_TIMEOUT_KEEP_ALIVE
        VLLM_KEEP_ALIVE_ON_ENGINE_DEATH VLLM_RUST_FRONTEND_PATH VLLM_SERVER_DEV_MODE
        VLLM_USE_RUST_FRONTEND""".split(),
        _NOTHING,
    ),
    **dict.fromkeys(
        """VLLM_ALLOW_RUNTIME_LORA_UPDATING VLLM_LORA_RESOLVER_CACHE_DIR
        VLLM_LORA_RESOLVER_HF_REPO_LIST""".split(),
        _ADAPTERS,
    ),
}
"""What the chart's `env`, too, takes none of. A machine's own environment may have the others."""

WITH_MEANING = frozenset(
    """
    additional_config aggregate_engine_logging all2all_backend allow_deprecated_quantization
    allowed_local_media_path anthropic_disabled_thinking_effort async_scheduling attention_backend
    attention_config aux_output_config block_size chat_template chat_template_content_format
    code_revision cohere_format cohere_is_reasoning_model collect_detailed_traces compilation_config
    config_format convert cp_kv_cache_interleave_size cpu_distributed_timeout_seconds cpu_offload_gb
    cpu_offload_params cudagraph_capture_sizes cudagraph_metrics custom_histogram_buckets
    data_parallel_address data_parallel_backend data_parallel_rpc_port data_parallel_size
    data_parallel_size_local dbo_decode_token_threshold dbo_prefill_token_threshold dcp_comm_backend
    dcp_kv_cache_interleave_size dcp_q_replicate decode_context_parallel_size
    default_chat_template_kwargs default_mm_loras device_ids diffusion_config disable_cascade_attn
    disable_chunked_mm_input disable_custom_all_reduce disable_hybrid_kv_cache_manager
    disable_log_stats disable_nccl_for_dp_synchronization disable_sliding_window
    distributed_executor_backend distributed_timeout_seconds download_dir dp_sync_interval dtype
    ec_manager_config ec_transfer_config elastic_ep_max_dp_size enable_auto_tool_choice
    enable_batch_sharded_sampling enable_chunked_prefill enable_cumem_allocator enable_dbo
    enable_elastic_ep enable_ep_weight_filter enable_eplb enable_expert_parallel
    enable_fault_tolerance enable_flash_late_interaction enable_flashinfer_autotune
    enable_force_include_usage enable_hc_sp enable_layerwise_nvtx_tracing enable_log_deltas
    enable_log_outputs enable_log_requests enable_logging_iteration_details enable_lora
    enable_mamba_cache_stochastic_rounding enable_mamba_shared_prefix_checkpoint enable_mfu_metrics
    enable_mixed_moe_lora_format enable_mm_embeds enable_moe_shared_loras enable_nccl_comm_suspend
    enable_per_request_metrics enable_prefix_caching enable_prompt_embeds
    enable_prompt_tokens_details enable_return_routed_experts enable_shm_tensor_arena
    enable_sleep_mode enable_tower_connector_lora enable_trace_replay enforce_eager engram_config
    eplb_config exclude_tools_when_tool_choice_none expert_placement_strategy
    fail_on_environ_validation fault_tolerance_config fingerprint_mode fingerprint_value
    fully_sharded_loras gdn_prefill_backend generation_config gpu_memory_utilization hf_config_path
    hf_overrides hf_token ignore_patterns interleave_mm_strings io_processor_plugin ir_op_priority
    jit_monitor_mode jit_monitor_verbose kda_decode_backend kda_prefill_backend kernel_config
    kv_cache_dtype kv_cache_dtype_skip_layers kv_cache_memory_bytes kv_cache_metrics
    kv_cache_metrics_sample kv_events_config kv_offloading_backend kv_offloading_size
    kv_sharing_fast_prefill kv_transfer_config language_model_only limit_mm_per_prompt
    linear_backend load_format log_config_file log_error_stack log_level logging_config
    logits_processors logprobs_mode long_prefill_token_threshold
    long_prefill_token_threshold_adaptive lora_dtype lora_target_modules mamba_backend
    mamba_block_size mamba_cache_dtype mamba_cache_mode mamba_cache_philox_rounds
    mamba_ssm_cache_dtype mamba_ssu_algorithm max_cpu_loras max_cudagraph_capture_size max_log_len
    max_lora_cls_labels max_lora_rank max_loras max_model_len max_num_active_seqs
    max_num_batched_tokens max_num_queued_reqs max_num_queued_tokens max_num_scheduled_tokens
    max_parallel_loading_workers media_io_kwargs mm_device_do_normalize mm_encoder_attn_backend
    mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_margin
    mm_encoder_fp8_scale_save_path mm_encoder_only mm_encoder_tp_mode mm_hasher_algorithm
    mm_ipc_gpu_memory_gb mm_processor_cache_gb mm_processor_cache_type mm_processor_device
    mm_processor_kwargs mm_shm_cache_max_object_size_mb mm_tensor_ipc model_class_overrides
    model_impl model_loader_extra_config moe_backend num_gpu_blocks_override numa_bind
    numa_bind_cpus numa_bind_nodes offload_backend offload_group_size offload_num_in_group
    offload_params offload_prefetch_step optimization_level override_generation_config
    per_request_spec_decode_metrics performance_mode pipeline_parallel_size pooler_config
    prefill_context_parallel_size prefill_schedule_interval prefix_cache_retention_interval
    prefix_caching_hash_algo prefix_match_unit profiler_config pt_load_map_location quantization
    quantization_config ray_workers_use_nsight reasoning_config reasoning_parser
    reasoning_parser_plugin renderer_num_workers replayssm_buffer_len response_role
    return_sampling_mask return_tokens_as_token_ids revision runner safetensors_load_strategy
    safetensors_prefetch_block_size safetensors_prefetch_num_threads scheduler_cls
    scheduler_reserve_full_isl scheduling_policy seed show_hidden_metrics_for_version
    shutdown_timeout skip_mm_profiling skip_tokenizer_init sleep_mode_offload_cudagraph
    sleep_preserve_parameter_names sparse_indexer_topk_backend spec_method spec_model spec_tokens
    specialize_active_lora speculative_config stream_interval structured_outputs_config
    swa_bounded_replay tokenizer tokenizer_mode tokenizer_revision tool_call_parser
    tool_parser_plugin tool_server tool_strict_level trust_remote_code trust_request_chat_template
    trust_request_mm_kwargs ubatch_size use_fp64_gumbel use_replayssm use_tqdm_on_load
    video_pruning_method video_pruning_rate watermark watermark_config weight_transfer_config
    worker_cls worker_extension_cls
    """.split()
)
"""The other arguments of vLLM 0.32's own server; a test compares the two lists with it."""

_ONE = ("data_parallel_size", "data_parallel_size_local")
_SHARES = ("gpu_memory_utilization",)

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
    if plain in _ONE:
        return "" if str(value) == "1" else _ENGINES
    if plain in _SHARES:
        return "" if _is_share(value) else "takes a share above 0 and up to 1: 90 % is 0.9"
    if plain != "chat_template":
        return ""
    return "" if isinstance(value, str) and re.search(TEMPLATE, value) else NO_TEMPLATE


def _is_share(value: Any) -> bool:
    try:
        return not isinstance(value, bool) and 0 < float(value) <= 1
    except (TypeError, ValueError):
        return False


def variables_problem(names: Iterable[str]) -> str:
    """The sentence about the first variable that must not be set; empty if there is none."""
    wrong = next((name for name in names if name in HARMFUL_VARIABLES), "")
    return wrong and f"the variable {wrong} {HARMFUL_VARIABLES[wrong]}"
