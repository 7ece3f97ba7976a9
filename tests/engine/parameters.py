"""A value for each parameter of vLLM's four requests for text, or why none is tried.

A parameter's value is chosen so that it would change the text that follows a cut, if another engine
did not go on as the first one would.
"""

from __future__ import annotations

from typing import Any

from tests.engine.prompts import TOOLS

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 9}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
_FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}

EVERYWHERE: dict[str, dict[str, Any]] = {
    "cache_salt": {"cache_salt": "salt"},
    "frequency_penalty": {"frequency_penalty": 0.4},
    "ignore_eos": {"ignore_eos": True},
    "include_stop_str_in_output": {"stop": ["e "], "include_stop_str_in_output": True},
    "logit_bias": {"logit_bias": {"70": 3.0}},
    "min_p": {"min_p": 0.1},
    "presence_penalty": {"presence_penalty": 0.7},
    "priority": {"priority": 3},
    "repetition_penalty": {"repetition_penalty": 1.2},
    "request_id": {"request_id": "mine"},
    "seed": {"seed": 5},
    "session_id": {"session_id": "one"},
    "skip_special_tokens": {"skip_special_tokens": False},
    "stop": {"stop": ["r "]},
    "stop_token_ids": {"stop_token_ids": [122]},
    "structured_outputs": {"structured_outputs": {"regex": "[a-f]{5}-[0-9]{9}"}},
    "temperature": {"temperature": 0.3},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.5},
    "user": {"user": "someone"},
    "vllm_xargs": {"vllm_xargs": {"mine": "1"}},
}
_CHAT_AND_COMPLETIONS: dict[str, dict[str, Any]] = {
    "add_special_tokens": {"add_special_tokens": True},
    "allowed_token_ids": {"allowed_token_ids": list(range(60, 122))},
    "bad_words": {"bad_words": ["e", " the", "t h"]},
    "length_penalty": {"length_penalty": 0.8},
    "max_tokens": {"max_tokens": 9},
    "min_tokens": {"min_tokens": 12, "stop": ["e"]},
    "n": {"n": 3},
    "repetition_detection": {
        "repetition_detection": {"max_pattern_size": 3, "min_pattern_size": 1, "min_count": 3}
    },
    "return_token_ids": {"return_token_ids": True},
    "return_tokens_as_token_ids": {"logprobs": 1, "return_tokens_as_token_ids": True},
    "response_format": {"response_format": _FORMAT},
    "spaces_between_special_tokens": {"spaces_between_special_tokens": False},
    "stream_interval": {"stream_interval": 3},
    "stream_options": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "truncate_prompt_tokens": {"truncate_prompt_tokens": 10},
    "truncation_side": {"truncate_prompt_tokens": 10, "truncation_side": "left"},
    "echo": {"echo": True},
}
CHAT: dict[str, dict[str, Any]] = {
    **EVERYWHERE,
    **_CHAT_AND_COMPLETIONS,
    "return_tokens_as_token_ids": {"logprobs": True, "return_tokens_as_token_ids": True},
    "add_generation_prompt": {"add_generation_prompt": False},
    "chat_template_kwargs": {"chat_template_kwargs": {"enable_thinking": True}},
    "continue_final_message": {"add_generation_prompt": False, "continue_final_message": True},
    "documents": {"documents": [{"title": "A", "text": "B"}]},
    "include_reasoning": {"include_reasoning": False},
    "logprobs": {"logprobs": True},
    "max_completion_tokens": {"max_completion_tokens": 9},
    "parallel_tool_calls": {"tools": TOOLS, "parallel_tool_calls": False},
    "return_prompt_text": {"return_prompt_text": True},
    "reasoning_effort": {"reasoning_effort": "low"},
    "tool_choice": {"tools": TOOLS, "tool_choice": "required"},
    "tools": {"tools": TOOLS},
    "top_logprobs": {"logprobs": True, "top_logprobs": 2},
}
COMPLETIONS: dict[str, dict[str, Any]] = {
    **EVERYWHERE,
    **_CHAT_AND_COMPLETIONS,
    "logprobs": {"logprobs": 2},
    "prompt": {"prompt": ["The keeper", "A river"]},
}
RESPONSES: dict[str, dict[str, Any]] = {
    **EVERYWHERE,
    "background": {"background": True},
    "chat_template_kwargs": {"chat_template_kwargs": {"enable_thinking": True}},
    "include": {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    "include_reasoning": {"include_reasoning": False},
    "instructions": {"instructions": "Be brief."},
    "max_output_tokens": {"max_output_tokens": 9},
    "max_tool_calls": {"tools": [], "max_tool_calls": 1},
    "metadata": {"metadata": {"a": "b"}},
    "parallel_tool_calls": {"parallel_tool_calls": False},
    "prompt_cache_key": {"prompt_cache_key": "one"},
    "reasoning": {"reasoning": {"effort": "low"}},
    "service_tier": {"service_tier": "auto"},
    "text": {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
    "tool_choice": {
        "tools": [{"type": "function", **TOOLS[0]["function"]}],
        "tool_choice": "required",
    },
    "tools": {"tools": [{"type": "function", **TOOLS[0]["function"]}]},
    "top_logprobs": {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    "truncation": {"truncation": "auto"},
}

MESSAGES: dict[str, dict[str, Any]] = {
    "cache_salt": EVERYWHERE["cache_salt"],
    "chat_template_kwargs": CHAT["chat_template_kwargs"],
    "max_tokens": {"max_tokens": 9},
    "metadata": {"metadata": {"user_id": "a"}},
    "output_config": {
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}}
    },
    "stop_sequences": {"stop_sequences": ["r "]},
    "system": {"system": [{"type": "text", "text": "Be brief."}]},
    "temperature": EVERYWHERE["temperature"],
    "thinking": {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 1030},
    "tool_choice": {
        "tools": [{"name": "f", "input_schema": SCHEMA, "strict": True}],
        "tool_choice": {"type": "any"},
    },
    "tools": {"tools": [{"name": "f", "input_schema": SCHEMA}]},
    "top_k": EVERYWHERE["top_k"],
    "top_p": EVERYWHERE["top_p"],
    "vllm_xargs": EVERYWHERE["vllm_xargs"],
}

UNTRIED: dict[str, str] = {
    "chat_template": "refused, unless `engine.args.trust_request_chat_template` is set",
    "ec_transfer_params": "for engines that share encoders; this service has none",
    "enable_response_messages": "refused by vLLM, unless its store is on",
    "input": "is in every request",
    "kv_transfer_params": "for engines that share prefills; this service has none",
    "logprob_token_ids": "continued, but vLLM 0.32 answers by what else is in its batch",
    "media_io_kwargs": "needs a model for images",
    "messages": "is in every request",
    "mm_payload": "needs a model for images",
    "mm_processor_kwargs": "needs a model for images",
    "model": "is in every request",
    "previous_input_messages": "needs gpt-oss",
    "previous_response_id": "the earlier items are in the journal, as all input is",
    "prompt": "refused by vLLM for responses",
    "prompt_embeds": "lost: a prompt that is not text",
    "prompt_logprobs": "refused when streamed; not streamed: continued",
    "return_mm_kwargs": "needs a model for images",
    "return_token_offsets": "needs a fast tokenizer with offsets; changes the prompt only",
    "routed_experts_prompt_start": "needs a model with experts",
    "store": "read by the ingress; engines never see a difference",
    "stream": "both values: not streamed, it begins again unless it can go on",
    "suffix": "needs a model that fills in",
    "thinking_token_budget": "greedy or with a seed: run again; sampled without one: lost",
    "use_beam_search": "refused when streamed; not streamed, it begins again",
    "watermarking": "needs an engine that marks its texts",
}
"""Why a parameter has no row of its own."""
