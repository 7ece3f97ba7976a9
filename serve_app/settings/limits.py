"""Limits on the content of one request. A request beyond a limit is refused with 400 before it
reaches an engine.
"""

from __future__ import annotations

from pydantic import Field

from serve_app.settings.sections import Section

MAX_TEXT_CHARS = 65_536
"""The highest value that a limit on the length of a text can have, because validation reads only
the first characters of longer texts.
"""

HARMFUL_FIELDS = (
    "chat_template",
    "ec_transfer_params",
    "kv_transfer_params",
    "media_io_kwargs",
    "mm_processor_kwargs",
    "prompt_embeds",
    "request_id",
    "vllm_xargs",
)
"""vLLM's own fields with which a client can reach into the engine or into another request."""


class RequestLimits(Section):
    """Limits on the content of one request; a request beyond one is refused with 400."""

    max_values: int = Field(300_000, ge=100, le=2_000_000)
    """Values in the whole body, such as the token ids of a prompt"""
    max_texts: int = Field(100_000, ge=100, le=1_000_000)
    """Strings in the whole body, including field names"""
    max_containers: int = Field(20_000, ge=100, le=200_000)
    """Lists and objects in the whole body"""
    max_depth: int = Field(100, ge=10, le=400)
    """Nesting depth of lists and objects"""
    max_messages: int = Field(2_048, ge=1)
    """Messages in a conversation"""
    max_tools: int = Field(512, ge=1)
    """Tools that the model may call"""
    max_sequences: int = Field(256, ge=1)
    """Answers of one request: prompts times `n`; never more than seven eighths of
    `workers.max_running_requests`, the slots that are not spare"""
    max_beams: int = Field(8, ge=0)
    """`n` of a beam search, which costs an engine far more than sampling; 0 refuses it"""
    max_inputs: int = Field(2_048, ge=1)
    """Texts in one embeddings request"""
    max_tokenize_bytes: int = Field(1 << 20, ge=1_024)
    """Body of /tokenize, whose answer is larger than its body"""
    max_stop: int = Field(16, ge=0, le=64)
    """`stop` strings, which are searched for after every token; OpenAI allows 4"""
    max_stop_chars: int = Field(1_024, ge=1, le=MAX_TEXT_CHARS)
    """Length of one `stop` string"""
    max_stop_token_ids: int = Field(128, ge=0, le=128)
    """Entries of `stop_token_ids`; vLLM's engine allows no more"""
    max_logit_bias: int = Field(1_024, ge=0, le=1_024)
    """Entries of `logit_bias`; vLLM's engine allows no more"""
    max_allowed_token_ids: int = Field(1_024, ge=0, le=1_024)
    """Entries of `allowed_token_ids`; vLLM's engine allows no more"""
    max_bad_words: int = Field(128, ge=0)
    """Entries of `bad_words`"""
    max_bad_word_chars: int = Field(256, ge=1, le=MAX_TEXT_CHARS)
    """Length of one entry of `bad_words`"""
    max_logprobs: int = Field(20, ge=0)
    """Value of `logprobs`, `top_logprobs` and `prompt_logprobs`"""
    max_schema_bytes: int = Field(262_144, ge=1_024)
    """Size of all JSON schemas in one request, also those of its tools"""
    max_schema_depth: int = Field(48, ge=4, le=64)
    """Nesting depth of a JSON schema, whose cost grows steeply with it"""
    max_repeats: int = Field(10_000, ge=1, le=100_000)
    """Value of a count in a JSON schema (`minItems`, `maxLength`, …) or a regular expression
    (`{n}`)"""
    max_regex_chars: int = Field(2_048, ge=1, le=MAX_TEXT_CHARS)
    """Length of a regular expression for the output"""
    max_grammar_chars: int = Field(16_384, ge=1, le=MAX_TEXT_CHARS)
    """Length of a grammar for the output"""
    max_structured_choices: int = Field(512, ge=1)
    """Entries of `choice` in `structured_outputs`"""
    max_structured_choice_chars: int = Field(1_024, ge=1, le=MAX_TEXT_CHARS)
    """Length of one entry of `choice` in `structured_outputs`"""
    max_name_chars: int = Field(512, ge=64, le=MAX_TEXT_CHARS)
    """Length of names such as `user` and `prompt_cache_key`"""
    media_domains: list[str] = Field([])
    """Hosts from which images, audio and video may be fetched; others must be sent as data:
    URLs"""
    allowed_fields: list[str] = Field([])
    """Fields to allow in addition to those of OpenAI and vLLM; also those that reach into the
    engine and are otherwise refused: chat_template, ec_transfer_params, kv_transfer_params,
    media_io_kwargs, mm_processor_kwargs, prompt_embeds, request_id, vllm_xargs"""
    refuse_unknown_fields: bool = False
    """Refuse a field that nobody here knows, instead of naming it in `x-hermes-ignored`"""
