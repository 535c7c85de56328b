"""Drives a running server with the stock OpenAI client; called by the test of the same name.

    python openai_client.py BASE_URL MODEL
"""

import sys

import openai

base, model = sys.argv[1], sys.argv[2]
client = openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=2)

assert [entry.id for entry in client.models.list()] == [model]

# A whole answer, and the same one as a stream.
messages = [
    {"role": "system", "content": "You answer briefly."},
    {"role": "user", "content": "Name a colour."},
]
whole = client.chat.completions.create(model=model, messages=messages, max_tokens=12)
text = whole.choices[0].message.content
assert text and whole.choices[0].finish_reason in ("stop", "length")
assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
assert whole.session_runtime["turn_id"]

pieces, usage, finish = [], None, None
for chunk in client.chat.completions.create(
    model=model, messages=messages, max_tokens=12, stream=True, stream_options={"include_usage": True}
):
    if chunk.choices:
        pieces.append(chunk.choices[0].delta.content or "")
        finish = chunk.choices[0].finish_reason or finish
    if chunk.usage:
        usage = chunk.usage
assert "".join(pieces) == text, (pieces, text)
assert finish == whole.choices[0].finish_reason
assert usage.completion_tokens == whole.usage.completion_tokens

# The helper that assembles a stream.
with client.chat.completions.stream(model=model, messages=messages, max_tokens=12) as stream:
    assert stream.get_final_completion().choices[0].message.content == text

# A named session: three turns with the whole history each, and reused KV from the second on.
session = {"X-Session-ID": "stock-client"}
history = [{"role": "user", "content": "My name is Ada."}]
reused = []
for question in ("What is my name?", "Spell it.", None):
    answer = client.chat.completions.create(
        model=model, messages=history, max_tokens=12, extra_headers=session
    )
    reused.append(answer.usage.prompt_tokens_details.cached_tokens)
    history.append({"role": "assistant", "content": answer.choices[0].message.content})
    history.append({"role": "user", "content": question})
assert reused[2] > reused[1] > 0, reused

# Errors arrive as the client's own exceptions.
try:
    client.chat.completions.create(model="another", messages=messages)
    raise AssertionError("an unknown model was accepted")
except openai.NotFoundError as error:
    assert error.code == "model_not_found" and error.param == "model", error
try:
    client.chat.completions.create(model=model, messages=messages, n=2)
    raise AssertionError("two choices were accepted")
except openai.BadRequestError as error:
    assert error.code == "unsupported_parameter" and error.param == "n", error
try:
    contradiction = [history[0], {"role": "assistant", "content": "No."}, history[2]]
    client.chat.completions.create(model=model, messages=contradiction, extra_headers=session)
    raise AssertionError("another history was accepted")
except openai.ConflictError as error:
    assert error.code == "history_mismatch", error

print("stock client: ok")
