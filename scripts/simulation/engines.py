"""What the model must know of an engine: limits, under vLLM's names, and times; a file for each."""

from pathlib import Path

import msgspec

from serve_app.errors import SettingsError

FOLDER = Path(__file__).parent / "engines"


class Timing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long a step takes: the sum of these, each times what the step holds."""

    step_ms: float
    """For the step itself, whatever it holds."""
    prefill_token_us: float = 0.0
    """For each token of a prompt that the step computes."""
    decode_sequence_us: float = 0.0
    """For each sequence that gets its next token."""
    context_token_ns: float = 0.0
    """For each token of context that those sequences read."""
    prefill_context_token_ps: float = 0.0
    """For each pair of a computed token of a prompt and a token that it attends to."""
    new_sequence_us: float = 0.0
    """For each sequence that begins in the step."""
    request_ms: float = 0.0
    """From a request's arrival until the engine knows it, and the way of its first token back."""


class EngineParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One engine. The defaults of the limits are vLLM's own."""

    name: str
    timing: Timing
    num_gpu_blocks: int
    """Blocks of KV cache."""
    block_size: int = 16
    """Tokens of one block."""
    max_num_seqs: int = 256
    """Sequences in a step."""
    max_num_batched_tokens: int = 2048
    """Tokens that a step computes; longer prompts are computed in chunks."""
    max_model_len: int = 4096
    """Tokens of a prompt and its answer together."""
    priority_scheduling: bool = False
    """vLLM's `scheduling_policy: priority`; a lower number goes first."""
    source: str = ""
    """Where the figures come from."""

    def longest(self) -> int:
        """Tokens that one sequence may have: what the model and the KV cache both allow."""
        return min(self.max_model_len, self.num_gpu_blocks * self.block_size)


def engine_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def load_engine(name: str) -> EngineParameters:
    """One of them, or a file of one's own.

    Raises:
        SettingsError: there is no such engine, or its file is wrong: a field is unknown, missing or
            of the wrong type.
    """
    path = Path(name) if name.endswith(".json") else FOLDER / f"{name}.json"
    try:
        return msgspec.json.decode(path.read_text(), type=EngineParameters)
    except msgspec.ValidationError as error:
        raise SettingsError(f"engine parameters: {error}") from None
    except (OSError, ValueError, msgspec.DecodeError) as error:
        raise SettingsError(
            f"no engine {name}: {error}. There are: {', '.join(engine_names())}"
        ) from None
