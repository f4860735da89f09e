"""A stand-in for `python -m vllm.entrypoints.openai.api_server`: an engine that sleeps, and writes the recorder's log.

The name of the model says what it does: `sleeps` serves, `dies` does not start, `killed` ends at its third request.
It has a child process, as vLLM has.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

STEP_S, TOKEN_S, ROW_S = 0.004, 2e-5, 1e-4
HEADER = {
    "engine": "vllm", "version": "0.32.0+cpu", "features": [], "num_blocks": 4097, "block_size": 16, "device": "none",
    "scheduler": {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "async_scheduling": False, "policy": "fcfs"},
    "cache": {"enable_prefix_caching": True}, "parallel": {"tensor_parallel_size": 1},
    "model": {"model": "sleeps", "max_model_len": 1024}, "model_sizes": {},
}  # fmt: skip


class Engine:
    """Continuous batching: every step takes all waiting prompts and decodes all other requests."""

    def __init__(self, log: Any) -> None:
        self.log = log
        self.changed = threading.Condition()
        self.requests: list[dict[str, Any]] = []

    def run(self) -> None:
        step = 0
        while True:
            with self.changed:
                while not self.requests:
                    self.changed.wait()
                batch = list(self.requests)
            step += 1
            start = time.monotonic()
            new = [request for request in batch if not request["tokens"]]
            old = [request for request in batch if request["tokens"]]
            time.sleep(STEP_S + TOKEN_S * sum(request["prompt"] for request in new) + ROW_S * len(old))
            line: dict[str, Any] = {
                "step": step,
                "start": start,
                "end": time.monotonic(),
                "waiting": 0,
                "decode_rows": len(old),
            }
            line["batch"] = [[request["id"], request["prompt"], 0] for request in new]
            line["context"] = sum(request["prompt"] + request["tokens"] - 1 for request in old)
            self.log.write(json.dumps(line) + "\n")
            self.log.flush()
            with self.changed:
                for request in batch:
                    request["tokens"] += 1
                    if request["tokens"] == request["output"]:
                        self.requests.remove(request)
                self.changed.notify_all()


class Handler(BaseHTTPRequestHandler):
    engine: Engine
    model = ""
    count = 0

    def do_GET(self) -> None:
        card = {"id": self.model, "owned_by": "vllm"}
        pages = {"/health": {}, "/version": {"version": "0.32.0"}, "/v1/models": {"data": [card]}}
        self.send_response(200 if self.path in pages else 404)
        self.end_headers()
        self.wfile.write(json.dumps(pages.get(self.path, {})).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Handler.count += 1
        if self.model == "killed" and Handler.count == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        request = {"id": f"r{Handler.count}", "prompt": len(body["prompt"]), "output": body["max_tokens"], "tokens": 0}
        self.send_response(200)
        self.end_headers()
        sent = 0
        with self.engine.changed:
            self.engine.requests.append(request)
            self.engine.changed.notify_all()
        while sent < request["output"]:
            with self.engine.changed:
                while request["tokens"] == sent:
                    self.engine.changed.wait()
            sent += 1
            usage = {"prompt_tokens": request["prompt"], "completion_tokens": sent}
            self.wfile.write(f"data: {json.dumps({'choices': [{'text': 'a'}], 'usage': usage})}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *args: Any) -> None:
        pass


def main(arguments: list[str]) -> None:
    Handler.model = arguments[arguments.index("--model") + 1]
    port = int(arguments[arguments.index("--port") + 1])
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(f"child {child.pid}\nWARNING errors like `OSError: [Errno 24] Too many open files` may come", flush=True)
    if Handler.model == "dies":
        child.kill()
        raise ValueError("max_num_batched_tokens is smaller than max_num_seqs")
    with open(os.environ["SERVESIM_STEPS"], "w", encoding="utf-8") as log:
        log.write(json.dumps({"header": HEADER}) + "\n")
        log.flush()
        Handler.engine = Engine(log)
        threading.Thread(target=Handler.engine.run, daemon=True).start()
        ThreadingHTTPServer.daemon_threads = True
        ThreadingHTTPServer.request_queue_size = 256
        ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main(sys.argv)
