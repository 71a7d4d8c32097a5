"""A server that answers completions by a script: what each request gets, in the order they come."""

import contextlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class ScriptedServer(ThreadingHTTPServer):
    """script: for each request "good", or how it goes wrong; all others are good."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, script=(), *, step_s=0.0):
        super().__init__(("127.0.0.1", 0), Handler)
        self.script, self.step_s = list(script), step_s
        self.bodies, self.headers, self.num_open, self.most_open = [], [], 0, 0
        self.paths = []
        self.lock = threading.Lock()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        self.answer(200, {"data": [{"id": "scripted"}]})

    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            kind = server.script.pop(0) if server.script else "good"
            server.bodies.append(body)
            server.headers.append(dict(self.headers))
            server.paths.append(self.path)
            server.num_open += 1
            server.most_open = max(server.most_open, server.num_open)
        try:
            self.complete(kind, body)
        finally:
            with server.lock:
                server.num_open -= 1

    def complete(self, kind, body):
        if kind == "refused":
            return self.answer(429, {"error": {"message": "the queue is full"}})
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        num_tokens = body["max_tokens"]
        num_parts = {"empty": 0, "pairs": num_tokens // 2}.get(kind, num_tokens)
        is_chat = "messages" in body
        if is_chat:
            self.event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for number in range(num_parts):
            time.sleep(self.server.step_s)
            if kind == "broken" and number == 2:
                return None
            if kind == "error" and number == 2:
                return self.event({"error": {"message": "it failed"}})
            if kind == "nonsense" and number == 2:
                return self.wfile.write(b"data: {oops\n\n")
            choice = {"delta": {"content": "x"}} if is_chat else {"text": "x"}
            self.event({"choices": [choice]})
        if is_chat:
            self.event({"choices": [{"delta": {}, "finish_reason": "length"}]})
        if kind != "no usage":
            num_input = 7 if is_chat else len(body["prompt"])
            usage = {"prompt_tokens": num_input, "completion_tokens": num_tokens}
            self.event({"choices": [], "usage": usage})
        self.wfile.write(b": a comment\n\ndata: [DONE]\n\n")
        return None

    def event(self, document):
        self.wfile.write(f"data: {json.dumps(document)}\n\n".encode())
        self.wfile.flush()

    def answer(self, status, document):
        text = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@contextlib.contextmanager
def scripted(script=(), **options):
    server = ScriptedServer(script, **options)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
