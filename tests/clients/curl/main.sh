#!/usr/bin/env bash
# curl: main.sh <base URL> <model>
set -euo pipefail
url=$1 model=$2
question='{"role": "user", "content": "What is the weather in Paris?"}'
weather='{"type": "function", "function": {"name": "get_weather", "description": "Get the weather of a city",
  "strict": true, "parameters": {"type": "object", "required": ["city"], "additionalProperties": false,
  "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}}}}}'
greedy='"model": "'$model'", "temperature": 0, "max_tokens": 150'

ask() { # <JSON of a chat> [options of curl]
    local body=$1
    shift
    curl -sS "$@" "$url/chat/completions" -H 'content-type: application/json' --data-binary "$body"
}
first_of() { grep -oE "\"$1\":\"([^\"\\\\]|\\\\.)*\"" | head -n 1 | cut -d: -f2-; } # a text, as JSON
joined() { grep -oE "\"$1\":\"([^\"\\\\]|\\\\.)*\"" | sed -E 's/^[^:]*:"(.*)"$/\1/' | tr -d '\n'; }

first="$greedy, \"tools\": [$weather], \"tool_choice\": \"required\", \"messages\": [$question]"
said=$(ask "{$first}")
called=$(first_of arguments <<< "$said")
called_streamed=$(ask "{$first, \"stream\": true}" -N --compressed | joined arguments)

calls=$(sed -E 's/.*"tool_calls":(\[[^]]*\]).*/\1/' <<< "$said") # with their ids
returned="{\"role\": \"tool\", \"tool_call_id\": $(first_of id <<< "$calls"), \"content\": \"21 degrees, dry\"}"
messages="[$question, {\"role\": \"assistant\", \"tool_calls\": $calls}, $returned]"
second="$greedy, \"tools\": [$weather], \"tool_choice\": \"none\", \"messages\": $messages"
answer=$(ask "{$second}" | first_of content)
streamed=$(ask "{$second, \"stream\": true}" -N --http2 | joined content) # asks for an upgrade to h2c

schema='{"type": "object", "properties": {"degrees": {"type": "number", "multipleOf": 7}}}'
form='"response_format": {"type": "json_schema", "json_schema": {"name": "weather", "schema": '$schema'}}'
refused=$(ask "{$greedy, $form, \"messages\": [$question]}" | first_of code)
long=$(printf 'Hello. %.0s' {1..1000})
long="$greedy, \"messages\": [{\"role\": \"user\", \"content\": \"$long\"}]"
too_long=$(ask "{$long}" -H 'Expect: 100-continue' | first_of code)
too_long_streamed=$(ask "{$long, \"stream\": true}" -N | first_of code)

# `head` leaves after some lines; curl then fails to write, and ends.
story="{\"model\": \"$model\", \"n\": 4, \"ignore_eos\": true, \"stream\": true, \"messages\": [$question]}"
cancelled=$({ ask "$story" -N 2> /dev/null || true; } | head -n 9 | first_of id)

printf '{"chat": {"called": %s, "called_streamed": "%s", "answer": %s, "streamed": "%s", "refused": %s, "too_long": %s, "too_long_streamed": %s, "cancelled": %s}}\n' \
    "$called" "$called_streamed" "$answer" "$streamed" "$refused" "$too_long" "$too_long_streamed" "$cancelled"
