#!/usr/bin/env python3
"""Talks to a running server (`session-runtime serve`) with the stock OpenAI client and plain HTTP.

    pip install openai
    python3 rest_client.py [http://127.0.0.1:8080]

A named session keeps its KV between requests: the second answer reports how many tokens were not
computed again, even though the KV was moved out of memory in between.
"""

import json
import sys
import urllib.request

from openai import OpenAI

base = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080"
client = OpenAI(base_url=f"{base}/v1", api_key="none")


def native(method, path, body=None):
    """One call of the native API."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(base + path, data=data, method=method)
    request.add_header("content-type", "application/json")
    with urllib.request.urlopen(request) as response:
        return json.load(response)


model = client.models.list().data[0].id
print(f"model: {model}")

messages = [{"role": "user", "content": "Name three colours."}]
session = {"X-Session-ID": "rest-client-example"}

print("first answer: ", end="", flush=True)
answer = ""
stream = client.chat.completions.create(
    model=model, messages=messages, max_tokens=48, stream=True, extra_headers=session
)
for chunk in stream:
    piece = chunk.choices[0].delta.content if chunk.choices else None
    if piece:
        answer += piece
        print(piece, end="", flush=True)
print()

moved = native("POST", "/v1/sessions/rest-client-example/kv/evict", {})
print(f"kv: {moved['from']} -> {moved['to']}, {moved['tokens']} tokens")

messages += [
    {"role": "assistant", "content": answer},
    {"role": "user", "content": "Which of them is the darkest?"},
]
second = client.chat.completions.create(
    model=model, messages=messages, max_tokens=48, extra_headers=session
)
print("second answer:", second.choices[0].message.content)
usage = second.usage
print(f"{usage.prompt_tokens} tokens of prompt, {usage.prompt_tokens_details.cached_tokens} of them reused")
for restore in second.session_runtime["restores"]:
    print(f"restore: {restore['tokens_loaded']} loaded, {restore['tokens_recomputed']} recomputed, {restore['ms']:.0f} ms")

native("DELETE", "/v1/sessions/rest-client-example")
