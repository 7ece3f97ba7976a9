"""Writes docs/settings.md from the settings tree; a test compares the two."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from serve_app.settings import Settings
from serve_app.settings.presets import PRESETS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "settings.md"

_HEAD = """# Settings

These are the `args` of the application in a Serve config file. For an unknown setting, a wrong unit
or an impossible combination the deployment fails with one line that names the setting and the fix.
`HERMES_REDIS_URL` in the environment of the Ray nodes replaces `redis.url`, so that no file
contains the password. On one machine, `scripts/quickstart --set order.claim_ahead=2` changes a
setting.

| setting | default | meaning |
|---|---|---|
"""

_TAIL = """
`engine.args` takes every argument of vLLM's own server by its name (`max_model_len`,
`gpu_memory_utilization`, `enable_prefix_caching`, `tool_call_parser`, …), which vLLM's own
parser validates before anything starts. What has no meaning here is refused, with what to do
instead: arguments of vLLM's HTTP server (`port`, `api_key`, `ssl_keyfile`, …), `lora_modules`, and
what another setting decides; so are the variables `VLLM_API_KEY` and `VLLM_DP_*`.
`workers.autoscaling` is off unless you configure it; the defaults above then apply.

## Presets

`preset` sets the following values where the configuration does not set them itself; a value of your
own always wins. Without `preset`, the defaults above and vLLM's own apply.

"""

_LAST = """
- With each preset, `engine.args.enable_prefix_caching` is `true`, and `engine.args.max_model_len`
  is `-1`: the model's own length, or as much of it as fits into the KV cache. Set a shorter one,
  such as 4096, if your requests are short.
- `gpu_memory_utilization` is set if `workers.device` is `gpu`. On CPUs, vLLM would read it as a
  share of the machine's memory; there the environment variable `VLLM_CPU_KVCACHE_SPACE` bounds the
  KV cache.
- `target_ongoing_requests` is set if `workers.autoscaling` is configured. The lower its share, the
  earlier another replica starts; the higher, the less is idle.
- A simulated engine takes `workers` from the preset, and none of vLLM's arguments.

`.venv/bin/python -m scripts.local.settings_page` writes this page.
"""


def _rows(section: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in section.model_fields.items():
        candidates = [field.annotation, *getattr(field.annotation, "__args__", ())]
        child = next(
            (c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None
        )
        if child is not None:
            yield from _rows(child, f"{prefix}{name}.")
        else:
            default = field.get_default(call_default_factory=True)
            shown = "" if default is None else f"`{default}`" if default != "" else ""
            yield f"| `{prefix}{name}` | {shown} | {field.description or ''} |"


def _presets() -> str:
    """The table of presets."""
    rows = {
        "workers.max_running_requests": "sequences",
        "engine.args.max_num_batched_tokens": "batched_tokens",
        "engine.args.gpu_memory_utilization": "memory_share",
        "workers.autoscaling.target_ongoing_requests ÷ workers.max_running_requests": "busy_share",
    }
    lines = [f"| setting | {' | '.join(f'`{name}`' for name in PRESETS)} |"]
    lines.append("|---|" + "---|" * len(PRESETS))
    lines += [
        f"| `{setting}` | {' | '.join(str(getattr(p, field)) for p in PRESETS.values())} |"
        for setting, field in rows.items()
    ]
    return "\n".join(lines) + "\n"


def page() -> str:
    """The page as it should be."""
    return _HEAD + "\n".join(_rows(Settings, "")) + "\n" + _TAIL + _presets() + _LAST


if __name__ == "__main__":
    PAGE.write_text(page())
