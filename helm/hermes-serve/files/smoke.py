"""`helm test`: the requests that a client would make. Standard library only."""

import json
import os
import sys
import time
import urllib.error
import urllib.request

URL = os.environ["HERMES_URL"]
KEY = os.environ.get("HERMES_API_KEY", "")
DEADLINE = time.monotonic() + float(os.environ["HERMES_TEST_SECONDS"])


def ask(path, body=None, key=KEY):
    headers = {"content-type": "application/json"}
    if key:
        headers["authorization"] = "Bearer " + key
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(URL + path, data=data, headers=headers)
    return urllib.request.urlopen(request, timeout=max(1, DEADLINE - time.monotonic()))


def wait_until_ready():
    while True:
        try:
            with ask("/readyz") as answer:
                return answer.status
        except (urllib.error.URLError, OSError) as error:
            if time.monotonic() > DEADLINE:
                sys.exit(f"not ready in time: {error}")
            time.sleep(1)


def check(what, right):
    if not right:
        sys.exit(f"failed: {what}")
    print(f"ok: {what}", flush=True)


check("ready", wait_until_ready() == 200)
with ask("/healthz") as answer:
    check("healthy", answer.status == 200)
with ask("/v1/models") as answer:
    models = [model["id"] for model in json.load(answer)["data"]]
check(f"serves {os.environ['HERMES_MODEL']}", os.environ["HERMES_MODEL"] in models)
if KEY:
    try:
        ask("/v1/models", key="not-a-key")
        refused = False
    except urllib.error.HTTPError as error:
        refused = error.code == 401
    check("a wrong key is refused", refused)

body = {
    "model": os.environ["HERMES_MODEL"],
    "messages": [{"role": "user", "content": "Say hello."}],
    "max_tokens": 8,
    "stream": True,
}
with ask("/v1/chat/completions", body) as answer:
    lines = [line.decode().strip() for line in answer]
events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
check("a streamed completion ends in [DONE]", events[-1:] == ["[DONE]"])
choices = [choice for event in events[:-1] for choice in json.loads(event).get("choices", [])]
check("it has a finish reason", any(choice.get("finish_reason") for choice in choices))
