"""The tiny model's tokenizer: one token for each byte, and a few special signs.

There are no merges, so a character of several bytes spans several tokens. That is on purpose:
whatever streams text must cope with a character that is cut in the middle, and with this model it
always has to.
"""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CONTEXT = 8192
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
# vLLM's parsers look these up as whole tokens; they are ordinary text to a client, so they are not
# hidden.
MARKS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
RESERVED = tuple(f"<|reserved_{i}|>" for i in range(6))
VOCABULARY = 256 + len(CONTROL) + len(MARKS) + len(RESERVED)


def byte_alphabet() -> list[str]:
    """The 256 printable stand-ins of ByteLevel, in the order of the bytes they stand for."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = (byte for byte in range(256) if byte not in plain)
    table = {byte: chr(byte) for byte in plain} | {
        byte: chr(256 + i) for i, byte in enumerate(shifted)
    }
    return [table[byte] for byte in range(256)]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer whose ids 0 to 255 are the bytes themselves."""
    core = Tokenizer(
        models.BPE(vocab={char: byte for byte, char in enumerate(byte_alphabet())}, merges=[])
    )
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True) for text in CONTROL])
    core.add_tokens([AddedToken(text, special=False) for text in MARKS])
    core.add_special_tokens([AddedToken(text, special=True) for text in RESERVED])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=None,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
        add_prefix_space=False,
        chat_template=(Path(__file__).parent / "chat_template.jinja").read_text(),
    )
