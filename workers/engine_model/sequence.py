"""One request inside an engine. Pure."""

from __future__ import annotations


class Sequence:
    """A prompt and the tokens that follow it.

    The content of a block is an id: equal ids mean that the block and all before it hold the same
    text. The ids of the first blocks are `prefix`; block `i` after them has `base + i`.

    Args:
        output_tokens: how many tokens it will generate.
        priority: for vLLM's priority scheduling; lower goes first.
        base: a number that no other text uses for its blocks.
        prefix: ids of the blocks at the beginning that other requests may share.
    """

    __slots__ = (
        "arrived",
        "base",
        "blocks",
        "computed",
        "held",
        "hit_tokens",
        "output_tokens",
        "preemptions",
        "prefix",
        "priority",
        "private",
        "produced",
        "prompt_tokens",
        "registered",
        "running",
        "started",
    )

    def __init__(
        self,
        prompt_tokens: int,
        output_tokens: int,
        priority: int = 0,
        base: int = 0,
        prefix: tuple[int, ...] = (),
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.priority = priority
        self.base = base
        self.prefix = prefix
        self.arrived = 0
        """Position in the order of arrival."""
        self.computed = 0
        """Tokens whose KV is in the cache."""
        self.produced = 0
        """Tokens generated."""
        self.blocks = 0
        """Blocks of KV that it occupies."""
        self.held: list[int] = []
        """Content of those blocks that others can use, in order."""
        self.private = 0
        """Number of the other blocks."""
        self.registered = 0
        """Blocks at the beginning whose content is known to the cache, or is a duplicate there."""
        self.running = False
        self.started = False
        self.hit_tokens = 0
        """Tokens that the prefix cache held when it began."""
        self.preemptions = 0

    @property
    def tokens(self) -> int:
        """Prompt and generated tokens."""
        return self.prompt_tokens + self.produced

    @property
    def missing(self) -> int:
        """Tokens to compute before the next can be generated."""
        return self.prompt_tokens + self.produced - self.computed

    @property
    def ended(self) -> bool:
        """Whether all of its tokens are generated."""
        return self.produced >= self.output_tokens

    def content(self, block: int) -> int:
        """The id of a block's content."""
        return self.prefix[block] if block < len(self.prefix) else self.base + block
