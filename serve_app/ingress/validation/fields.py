"""The fields that a request's body may have: a closed list for each path. Pure.

They are the fields of vLLM's own request models (0.32) and those that OpenAI documents.
`tests/engine/test_names_of_vllm.py` compares these lists with both, so a field that a new vLLM
brings is refused until somebody has judged it: it belongs here, or to `HARMFUL_FIELDS`. A name that
the service uses itself inside of an engine is in no list.
"""

from __future__ import annotations

from collections.abc import Mapping

from serve_app.contract import INPUT_TOKENS, RESPONSES

_READ_HERE = "model prompt_cache_key service_tier user"
_WRITING = """
    cache_salt frequency_penalty ignore_eos include_stop_str_in_output logit_bias min_p mm_payload
    presence_penalty priority repetition_penalty return_mm_kwargs seed session_id
    skip_special_tokens stop stop_token_ids stream structured_outputs temperature top_k top_p
    watermarking
"""
_TOKENS = """
    add_special_tokens allowed_token_ids bad_words echo length_penalty logprob_token_ids logprobs
    max_tokens min_tokens n prompt_logprobs repetition_detection response_format return_token_ids
    return_token_offsets return_tokens_as_token_ids routed_experts_prompt_start
    spaces_between_special_tokens stream_interval stream_options thinking_token_budget
    truncate_prompt_tokens truncation_side use_beam_search
"""
_TOOLS = "chat_template_kwargs include_reasoning parallel_tool_calls tool_choice tools top_logprobs"
_CHAT = """
    add_generation_prompt add_special_tokens chat_template_kwargs continue_final_message messages
"""

_RESPONSES = frozenset(
    f"""
    {_READ_HERE} {_WRITING} {_TOOLS} background enable_response_messages include input
    instructions max_output_tokens max_tool_calls metadata previous_input_messages
    previous_response_id prompt reasoning store text truncation
    """.split()
)

OF_VLLM: Mapping[str, frozenset[str]] = {
    "/v1/chat/completions": frozenset(
        f"""
        {_READ_HERE} {_WRITING} {_TOKENS} {_TOOLS} {_CHAT} documents max_completion_tokens
        metadata reasoning_effort return_prompt_text store
        """.split()
    ),
    "/v1/completions": frozenset(f"{_READ_HERE} {_WRITING} {_TOKENS} prompt suffix".split()),
    RESPONSES: _RESPONSES,
    INPUT_TOKENS: _RESPONSES,
    "/v1/embeddings": frozenset(
        f"""
        {_READ_HERE} {_CHAT} cache_salt dimensions embed_dtype encoding_format endianness input
        padding priority truncate_prompt_tokens truncation_side use_activation
        """.split()
    ),
    "/tokenize": frozenset(f"{_READ_HERE} {_CHAT} prompt return_token_strs tools".split()),
    "/detokenize": frozenset(f"{_READ_HERE} tokens".split()),
}
"""By path: what vLLM's models know, and what the ingress reads itself."""

_OPENAIS = "moderation prompt_cache_options prompt_cache_retention safety_identifier"
WITHOUT_EFFECT: Mapping[str, frozenset[str]] = {
    "/v1/chat/completions": frozenset(
        f"""
        {_OPENAIS} audio function_call functions modalities prediction verbosity
        web_search_options
        """.split()
    ),
    "/v1/completions": frozenset({"best_of"}),
    RESPONSES: frozenset(
        f"{_OPENAIS} access_programs context_management conversation image stream_options".split()
    ),
    INPUT_TOKENS: frozenset({"conversation", "personality"}),
    "/v1/embeddings": frozenset({"stream"}),
}
"""By path: what OpenAI documents and vLLM does not know. It is taken, because OpenAI's clients send
it.
"""


def is_known(path: str, name: str) -> bool:
    """Whether a body sent to one of `INFERENCE_PATHS` may have this field."""
    return name in OF_VLLM[path] or name in WITHOUT_EFFECT.get(path, ())
