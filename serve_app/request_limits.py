"""What one request may hold. Above any of these it is refused with 400, before an engine sees it."""

from __future__ import annotations

from pydantic import Field

from serve_app.section import Section

MAX_TEXT_CHARS = 65_536
"""The most that a limit of a text's length can be: of longer texts only a beginning is looked at."""

HARMFUL_FIELDS = (
    "chat_template", "ec_transfer_params", "kv_transfer_params", "media_io_kwargs", "mm_processor_kwargs",
    "prompt_embeds", "request_id", "vllm_xargs",
)  # fmt: skip
"""Fields of vLLM's own with which a client can reach into the engine, or into another's request."""


class RequestLimits(Section):
    """What one request may hold; what is above is refused with 400."""

    max_values: int = Field(300_000, ge=100, le=2_000_000, description="in all, such as the token ids of a prompt")
    max_texts: int = Field(100_000, ge=100, le=1_000_000, description="texts in all, the names of fields among them")
    max_containers: int = Field(20_000, ge=100, le=200_000, description="lists and objects in all")
    max_depth: int = Field(100, ge=10, le=400, description="of lists and objects in each other")
    max_messages: int = Field(2_048, ge=1, description="in a conversation")
    max_tools: int = Field(512, ge=1, description="that a model may call")
    max_sequences: int = Field(256, ge=1, description="answers of one request: prompts times `n`")
    max_beams: int = Field(8, ge=0, description="`n` of a beam search, which costs an engine far more; 0: none")
    max_inputs: int = Field(2_048, ge=1, description="texts of one request for embeddings")
    max_tokenize_bytes: int = Field(1 << 20, ge=1_024, description="of /tokenize, whose answer is larger than its body")
    max_stop: int = Field(
        16, ge=0, le=64, description="`stop` texts, each looked for after every token; OpenAI takes 4"
    )
    max_stop_chars: int = Field(1_024, ge=1, le=MAX_TEXT_CHARS, description="of one `stop` text")
    max_stop_token_ids: int = Field(128, ge=0, le=128, description="vLLM's engine takes no more")
    max_logit_bias: int = Field(1_024, ge=0, le=1_024, description="entries; vLLM's engine takes no more")
    max_allowed_token_ids: int = Field(1_024, ge=0, le=1_024, description="vLLM's engine takes no more")
    max_bad_words: int = Field(128, ge=0, description="texts that may not be written")
    max_bad_word_chars: int = Field(256, ge=1, le=MAX_TEXT_CHARS, description="of one of them")
    max_logprobs: int = Field(20, ge=0, description="of `logprobs`, `top_logprobs` and `prompt_logprobs`")
    max_schema_bytes: int = Field(262_144, ge=1_024, description="JSON schemas of one request, its tools' among them")
    max_schema_depth: int = Field(48, ge=4, le=64, description="of a schema: its cost grows steeply")
    max_repeats: int = Field(
        10_000,
        ge=1,
        le=100_000,
        description="a count in a schema (`minItems`, `maxLength`, …) or an expression (`{n}`)",
    )
    max_regex_chars: int = Field(2_048, ge=1, le=MAX_TEXT_CHARS, description="of a regular expression for the output")
    max_grammar_chars: int = Field(16_384, ge=1, le=MAX_TEXT_CHARS, description="of a grammar for the output")
    max_choices: int = Field(512, ge=1, description="texts that the output may be one of")
    max_choice_chars: int = Field(1_024, ge=1, le=MAX_TEXT_CHARS, description="of one of them")
    max_name_chars: int = Field(512, ge=64, le=MAX_TEXT_CHARS, description="`user`, `prompt_cache_key` and such")
    media_domains: list[str] = Field(
        default_factory=list, description="hosts from which media may be fetched; others, and addresses, only as data:"
    )
    allowed_fields: list[str] = Field(
        default_factory=list, description=f"of those that are refused: {', '.join(HARMFUL_FIELDS)}"
    )
