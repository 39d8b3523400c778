"""A language model that is not one: an HTTP server on 127.0.0.1 with invented replies.

Real agents are run against it, so it speaks as much as they need of three
interfaces: OpenAI chat completions, OpenAI responses and Anthropic messages,
each streamed or whole, and a listing of models.

Theory: a reply depends on the last user message, on how often the model spoke since,
and on nothing else; not on the number of the request (agents ask from several threads,
e.g. for a title), not on the clock, not on the rest of the prompt (which holds paths).
So the same prompts give the same replies on every filesystem. A message that contains
``[echo]`` is answered with a code block that gptme runs (``echo``); ``[save]`` with one
by which it writes a file into its workspace; ``[long]`` with some 10 kB of prose. The
reply after such a block has none, so a turn ends.

Each response closes its connection, so that `serving` can wait for every thread:
nothing outlives it.

By hand: ``python tests/agents/fake_llm.py [port]`` prints the address and serves
until interrupted.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar, TypeAlias

Json: TypeAlias = dict[str, Any]

MODEL = "fake-1"
WORDS = ("delta", "pool", "extent", "journal", "suffix", "résumé", "fence", "日本", "recipe", "naïve", "inode")
LONG_WORDS = 1500
DELTA_CHARS = 48
BODY_BYTES_MAX = 64 << 20
CONNECTION_SECONDS_MAX = 30


def reply_to(prompt: str, replies_before: int = 0) -> str:
    """The reply to a user message that was already answered so many times."""
    if replies_before:
        prompt = f"{replies_before} after {hashlib.sha256(prompt.encode()).hexdigest()}"
    seed = hashlib.sha256(prompt.encode()).digest()
    state = int.from_bytes(seed[:8], "big")
    words = []
    for number in range(LONG_WORDS if "[long]" in prompt else 20 + seed[8]):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        words.append(WORDS[(state >> 33) % len(WORDS)] + ("\n" if number % 14 == 13 else ""))
    text = f"Reply {seed.hex()[:12]}: {' '.join(words)}.\n"
    if seed[9] % 2:
        text += '\n```python\nprint("nobody runs this \\\\ \\t")\n```\n'
    if "[echo]" in prompt:
        text += f"\n```shell\necho {seed.hex()}\n```\n"
    if "[save]" in prompt:
        text += f"\n```save notes-{seed.hex()[:6]}.md\n# Notes\n\n{' '.join(words[:40])}\n```\n"
    return text


def last_prompt(messages: Sequence[Json]) -> tuple[str, int]:
    """The last message by the user, in any of the three interfaces, and the number of replies since."""
    replies = 0
    for message in reversed(messages):
        role, content = message.get("role"), message.get("content") or ""
        replies += role == "assistant"
        if role != "user":
            continue
        if isinstance(content, str):
            return content, replies
        return "\n".join(part["text"] for part in content if isinstance(part.get("text"), str)), replies
    return "", replies


def tokens(text: str) -> int:
    return max(1, len(text) // 4)


def pieces(text: str) -> list[str]:
    return [text[at : at + DELTA_CHARS] for at in range(0, len(text), DELTA_CHARS)]


def event(data: Json) -> str:
    """One server-sent event, named by its type as Anthropic and the responses API do."""
    return f"event: {data['type']}\ndata: {json.dumps(data)}\n\n"


def chat_completion(prompt: str, text: str) -> Json:
    usage = {"prompt_tokens": tokens(prompt), "completion_tokens": tokens(text)}
    return {
        "id": "chatcmpl-0",
        "object": "chat.completion",
        "created": 0,
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": text},
                "finish_reason": "stop",
            }
        ],
        "usage": usage | {"total_tokens": sum(usage.values())},
    }


def chat_stream(prompt: str, text: str) -> Iterator[str]:
    whole = chat_completion(prompt, text)
    head = {
        "id": whole["id"],
        "object": "chat.completion.chunk",
        "created": 0,
        "model": MODEL,
    }
    deltas: list[Json] = [{"role": "assistant", "content": ""}]
    deltas += [{"content": piece} for piece in pieces(text)]
    for delta in deltas:
        choice = {"index": 0, "delta": delta, "finish_reason": None}
        yield f"data: {json.dumps(head | {'choices': [choice]})}\n\n"
    choice = {"index": 0, "delta": {}, "finish_reason": "stop"}
    yield f"data: {json.dumps(head | {'choices': [choice]})}\n\n"
    yield f"data: {json.dumps(head | {'choices': [], 'usage': whole['usage']})}\n\n"
    yield "data: [DONE]\n\n"


def anthropic_message(prompt: str, text: str) -> Json:
    return {
        "id": "msg_0",
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [{"type": "text", "text": text}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": tokens(prompt), "output_tokens": tokens(text)},
    }


def anthropic_stream(prompt: str, text: str) -> Iterator[str]:
    whole = anthropic_message(prompt, text)
    yield event({"type": "message_start", "message": whole | {"content": [], "stop_reason": None}})
    empty = {"type": "text", "text": ""}
    yield event({"type": "content_block_start", "index": 0, "content_block": empty})
    for piece in pieces(text):
        delta = {"type": "text_delta", "text": piece}
        yield event({"type": "content_block_delta", "index": 0, "delta": delta})
    yield event({"type": "content_block_stop", "index": 0})
    stop = {"stop_reason": "end_turn", "stop_sequence": None}
    yield event({"type": "message_delta", "delta": stop, "usage": whole["usage"]})
    yield event({"type": "message_stop"})


def response(prompt: str, text: str) -> Json:
    usage = {"input_tokens": tokens(prompt), "output_tokens": tokens(text)}
    part = {"type": "output_text", "text": text, "annotations": []}
    return {
        "id": "resp_0",
        "object": "response",
        "created_at": 0,
        "status": "completed",
        "model": MODEL,
        "output": [
            {
                "id": "msg_0",
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [part],
            }
        ],
        "usage": usage | {"total_tokens": sum(usage.values())},
    }


def response_stream(prompt: str, text: str) -> Iterator[str]:
    whole = response(prompt, text)
    item = whole["output"][0]
    at = {"item_id": item["id"], "output_index": 0, "content_index": 0}
    begun = whole | {"status": "in_progress", "output": [], "usage": None}
    yield event({"type": "response.created", "response": begun})
    empty = item | {"status": "in_progress", "content": []}
    yield event({"type": "response.output_item.added", "output_index": 0, "item": empty})
    part = item["content"][0]
    yield event({"type": "response.content_part.added", **at, "part": part | {"text": ""}})
    for piece in pieces(text):
        yield event({"type": "response.output_text.delta", **at, "delta": piece})
    yield event({"type": "response.output_text.done", **at, "text": text})
    yield event({"type": "response.content_part.done", **at, "part": part})
    yield event({"type": "response.output_item.done", "output_index": 0, "item": item})
    yield event({"type": "response.completed", "response": whole})


INTERFACES = {
    "/chat/completions": ("messages", chat_completion, chat_stream),
    "/messages": ("messages", anthropic_message, anthropic_stream),
    "/responses": ("input", response, response_stream),
}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = CONNECTION_SECONDS_MAX
    server: Server

    def do_HEAD(self) -> None:
        self._whole({})

    def do_GET(self) -> None:
        if self.path.split("?")[0].endswith("/models"):
            model: Json = {"id": MODEL, "object": "model", "type": "model", "display_name": MODEL}
            model |= {"created": 0, "created_at": "1970-01-01T00:00:00Z", "owned_by": "nobody"}
            self._whole({"object": "list", "data": [model], "has_more": False})
        else:
            self._whole({"error": {"message": "no such page"}}, status=404)

    def do_POST(self) -> None:
        size = int(self.headers.get("content-length") or 0)
        if not 0 < size <= BODY_BYTES_MAX:
            self._whole({"error": {"message": "a body is needed"}}, status=400)
            return
        body = json.loads(self.rfile.read(size))
        path = self.path.split("?")[0]
        if path.endswith("/messages/count_tokens"):
            self._whole({"input_tokens": size // 4})
            return
        for ending, (field, whole, stream) in INTERFACES.items():
            if path.endswith(ending):
                given = body.get(field, [])
                prompt, replies = (given, 0) if isinstance(given, str) else last_prompt(given)
                text = reply_to(prompt, replies)
                with self.server.lock:
                    self.server.prompts.append(prompt)
                if body.get("stream"):
                    self._streamed(stream(prompt, text))
                else:
                    self._whole(whole(prompt, text))
                return
        self._whole({"error": {"message": f"nothing at {path}"}}, status=404)

    def _whole(self, data: Json, *, status: int = 200) -> None:
        payload = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(payload)))
        self.send_header("connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(payload)

    def _streamed(self, events: Iterator[str]) -> None:
        """Send events in chunks of their own, as they would come from a slow model."""
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.send_header("connection", "close")
        self.end_headers()
        for text in events:
            payload = text.encode()
            self.wfile.write(b"%x\r\n%b\r\n" % (len(payload), payload))
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, format: str, *args: object) -> None:
        self.server.requests.append(format % args)


class Server(ThreadingHTTPServer):
    """Serves until closed; remembers what was asked, for a test that fails."""

    daemon_threads = False
    block_on_close = True
    request_queue_size = 64
    errors_kept_max: ClassVar[int] = 20

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.lock = threading.Lock()
        self.prompts: list[str] = []
        self.requests: list[str] = []
        self.errors: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        if len(self.errors) < self.errors_kept_max:
            self.errors.append(repr(sys.exc_info()[1]))


@contextmanager
def serving() -> Iterator[Server]:
    """A server on a free port; on leaving, every thread of it has ended."""
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def main() -> None:
    server = Server(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
    print(server.url, flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()


if __name__ == "__main__":
    main()
