"""What agents send in their histories becomes what vLLM reads."""

from __future__ import annotations

import json
from typing import Any

import pytest

from serve_app.contract import COMPACT, RESPONSES
from tests.tables import each
from workers.request_body import NotRead, as_vllm_reads, as_vllm_takes, opened, sealed

USER = {"type": "message", "role": "user", "content": "Hi"}
SAID = {"type": "message", "role": "assistant", "content": "Hello."}
LS = {"type": "exec", "command": ["ls"], "env": {}}
TEXTS = ("", "plain", 'é€ 😀\n"\\', "half a pair \ud83d", "x" * 100_000)


@each("text", TEXTS)
def test_a_sealed_text_is_opened_again_and_no_other(text: str) -> None:
    content = sealed(text)
    assert opened(content) == text.encode(errors="replace").decode()
    for other in (content[:-5], content[4:], content + "A", "hs1.", "hs1.é", "gAAAA", "", None, 3):
        assert opened(other) is None
    swapped = f"{content[:8]}{'B' if content[8] == 'A' else 'A'}{content[9:]}"
    assert opened(swapped) is None


def call(name: str, arguments: str, call_id: str = "c") -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}


def output(text: str, call_id: str = "c") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": text}


def thought(text: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": content}


SUMMARY = [{"type": "summary_text", "text": "s"}]
SEARCH = {"type": "search", "query": "q"}


@each(
    "item, want",
    [
        (
            {
                "type": "local_shell_call",
                "id": "l",
                "call_id": "c",
                "status": "completed",
                "action": LS,
            },
            [call("local_shell", '{"action":{"type":"exec","command":["ls"],"env":{}}}')],
        ),
        ({"type": "local_shell_call_output", "id": "c", "output": "a.txt"}, [output("a.txt")]),
        (
            {"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "a"}]},
            [output('[{"stdout":"a"}]')],
        ),
        (
            {"type": "apply_patch_call_output", "call_id": "c", "status": "failed"},
            [output("failed")],
        ),
        (
            {"type": "web_search_call", "status": "completed", "action": SEARCH},
            [
                call("web_search", '{"action":{"type":"search","query":"q"}}', "call_0"),
                output("completed", "call_0"),
            ],
        ),
        (
            {
                **{"type": "mcp_call", "id": "m", "server_label": "s", "name": "f"},
                **{"arguments": "{}", "output": "found"},
            },
            [call("f", "{}", "m"), output("found", "m")],
        ),
        (
            {"type": "tool_search_output", "call_id": "c", "tools": [{"name": "f"}]},
            [output('[{"name":"f"}]')],
        ),
        ({"type": "reasoning", "id": "rs_1", "encrypted_content": sealed("t")}, [thought("t")]),
        ({**thought("t"), "encrypted_content": sealed("u")}, [thought("t")]),
        (
            {"type": "reasoning", "id": "rs_1", "summary": SUMMARY, "encrypted_content": "gAAAA"},
            [{"type": "reasoning", "id": "rs_1", "summary": SUMMARY}],
        ),
        ({"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAA"}, []),
        ({"type": "compaction_trigger"}, []),
        ({"type": "wat"}, [{"type": "wat"}]),
        ({"content": "x"}, [{"content": "x"}]),
        (3, [3]),
    ],
)
def test_an_item_becomes_what_vllm_knows(item: Any, want: list[Any]) -> None:
    assert as_vllm_reads([item]) == want


def test_a_summary_stands_for_the_answers_before_it() -> None:
    system = {**USER, "role": "system"}
    before = [system, USER, SAID, thought("t"), call("f", "{}"), output("o")]
    for kind in ("compaction", "compaction_summary"):
        made = {"type": kind, "encrypted_content": sealed("All is well.")}
        older = {"type": kind, "encrypted_content": sealed("long ago")}
        read = as_vllm_reads([older, *before, made, SAID, USER])
        assert read[:2] == [system, USER]
        assert read[2]["role"] == "user"
        assert read[2]["content"].endswith("All is well.")
        assert read[3:] == [SAID, USER]
    with pytest.raises(NotRead, match=r"^input\[1\]\.encrypted_content"):
        as_vllm_reads([USER, {"type": "compaction", "encrypted_content": "gAAAA"}])


@each(
    "path, given",
    [
        (COMPACT, "Hi"),
        (COMPACT, [USER]),
        (COMPACT, []),
        (RESPONSES, [USER, {"type": "compaction_trigger"}]),
        (RESPONSES, [USER, {"type": "compaction_trigger", "id": "t"}]),
    ],
)
def test_a_summary_is_asked_for_where_it_is_wanted(path: str, given: Any) -> None:
    tools = [{"type": "custom", "name": "c"}]
    body = {"input": given, "tools": tools, "tool_choice": "required", "text": {"format": {}}}
    sent = json.loads(as_vllm_takes(path, json.dumps(body).encode(), "req_1"))
    assert (sent["compacts"], sent["tool_choice"], sent["tools"]) == (path, "none", tools)
    assert "text" not in sent
    *said, told = sent["input"]
    assert [one["content"] for one in said] == ["Hi"] * bool(given)
    assert told["role"] == "user"


def test_no_summary_is_asked_for_elsewhere() -> None:
    body = {"input": [USER, {"type": "compaction_trigger"}, USER]}
    sent = json.loads(as_vllm_takes(RESPONSES, json.dumps(body).encode(), "req_1"))
    assert sent["input"] == [USER, USER]
    assert "compacts" not in sent
