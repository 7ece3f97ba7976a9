"""The fields that a request's body may have: a closed list for each path. Pure.

They are the fields of vLLM's own request models (0.32) and those that OpenAI documents.
`tests/engine/test_names_of_vllm.py` compares these lists with both, so a field that a new vLLM
brings reaches no engine until somebody has judged it: it belongs here, or to `HARMFUL_FIELDS`. A
name that the service uses itself inside of an engine is in no list.

Clients send fields of their own, which change nothing (`client_metadata`): these are left out of
the body. A field that would have an effect elsewhere is refused instead, because the client would
believe that it counts here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from serve_app.contract import INPUT_TOKENS, RESPONSES
from serve_app.settings.limits import HARMFUL_FIELDS

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

MEANING: Mapping[str, Mapping[str, str]] = {
    "/v1/completions": {"max_completion_tokens": "max_tokens"},
}
"""By path: fields under another endpoint's name, and the field that each means. As in vLLM's chats,
the other name counts if both are there.
"""
_KNOWN = {
    path: names.union(WITHOUT_EFFECT.get(path, ()), MEANING.get(path, ()))
    for path, names in OF_VLLM.items()
}
_FORMER = {
    *"activation additional_data early_stopping logits_processors normalize softmax".split(),
    "structural_tag",
}
"""What older versions of vLLM knew."""
_ANYWHERE = frozenset(_FORMER).union(*_KNOWN.values())
_LEAST_CHARS, _MOST_CHARS = 3, 64
"""Of a name that may be a misspelt one: every letter is one letter away from `n`."""


def is_known(path: str, name: str) -> bool:
    """Whether a body sent to one of `INFERENCE_PATHS` may have this field."""
    return name in _KNOWN[path]


def why_refused(path: str, name: str) -> str | None:
    """Why a field that is not known for this path must not be left out; None if nobody here knows
    it.
    """
    if name in HARMFUL_FIELDS:
        return f"The field '{name}' is not allowed here; remove it."
    unknown = f"Unknown parameter: '{name}'."
    if name.startswith("guided_"):
        return f"{unknown} Use 'structured_outputs' instead."
    if meant := _misspelt(path, name):
        return f"{unknown} Did you mean '{meant}'?"
    return unknown if name in _ANYWHERE else None


def _misspelt(path: str, name: str) -> str | None:
    """The field of this path from which a name differs by one letter at most: another one, one more
    or less, or two that changed places. Capitals, underscores and hyphens do not count.
    """
    if not _LEAST_CHARS <= len(name) <= _MOST_CHARS:
        return None
    for known in sorted(_KNOWN[path]):
        if len(known) >= _LEAST_CHARS and _is_near(_letters(name), _letters(known)):
            return known
    return None


def _letters(name: str) -> str:
    return name.casefold().replace("_", "").replace("-", "")


def _is_near(one: str, other: str) -> bool:
    if abs(len(one) - len(other)) > 1:
        return False
    begin = next((at for at, (a, b) in enumerate(zip(one, other)) if a != b), None)  # noqa: B905
    if begin is None:
        return True
    rest, other_rest = one[begin:], other[begin:]
    return (
        rest[1:] == other_rest[1:]
        or rest[1:] == other_rest
        or rest == other_rest[1:]
        or (rest[:2] == other_rest[1::-1] and rest[2:] == other_rest[2:])
    )


def rewritten(path: str, body: bytes, left_out: Collection[str]) -> bytes:
    """The body without some of its fields, and with every other under the name that vLLM knows.

    Args:
        body: a JSON object.
    """
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    for name, meant in MEANING.get(path, {}).items():
        if (value := fields.pop(name, None)) is not None and bytes(value) != b"null":
            fields[meant] = value
    return msgspec.json.encode({k: v for k, v in fields.items() if k not in left_out})
