"""LiteLLM: python batch_with_litellm.py <base URL> <model>

Uploads a batch, follows it to its end, and prints its status, its counts and the answered lines.
"""

import json
import sys
import time
from typing import Any

import litellm

URL, MODEL = sys.argv[1:]
LINES = 3
SERVICE: dict[str, Any] = {"custom_llm_provider": "hosted_vllm", "api_base": URL, "api_key": "none"}


def line(number: int) -> dict[str, Any]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 4}
    url = "/v1/chat/completions"
    return {"custom_id": f"line-{number}", "method": "POST", "url": url, "body": body}


def main() -> None:
    text = "".join(json.dumps(line(number)) + "\n" for number in range(LINES)).encode()
    file = litellm.create_file(file=("in.jsonl", text), purpose="batch", **SERVICE)
    batch: Any = litellm.create_batch(
        completion_window="24h",
        endpoint="/v1/chat/completions",
        input_file_id=file.id,
        metadata={"by": "litellm"},
        **SERVICE,
    )
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        time.sleep(0.1)
        batch = litellm.retrieve_batch(batch_id=batch.id, **SERVICE)
    content: Any = litellm.file_content(file_id=batch.output_file_id, **SERVICE)
    found = [json.loads(one) for one in content.content.splitlines()]
    counts = batch.request_counts
    told = {
        "status": batch.status,
        "completed": counts.completed,
        "failed": counts.failed,
        "metadata": batch.metadata,
        "answers": {one["custom_id"]: one["response"]["status_code"] for one in found},
    }
    print(json.dumps(told))


main()
