"""As much of GitHub's REST API as publishing meets, on a port of this host: comments, checks, and how each goes wrong.

Bodies are refused over `most_characters` (UTF-16 units) and `most_bytes`, comments are changed by their authors alone,
a job's own token may not ask who it is, and listings come in pages of at most `page_cap`.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

BOT = "github-actions[bot]"
JOB_TOKEN = "ghs_" + "j0b" * 12
REPOSITORY = "octo/engine"
Answer = tuple[int, Any, dict[str, str]]
"""Status, document and headers."""
OLD, NEW = "a" * 40, "b" * 40


@dataclass
class Fault:
    """An answer in place of the real one; `taken`: the request is carried out all the same."""

    method: str
    status: int
    message: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    taken: bool = False
    path: str = ""


class FakeGitHub(ThreadingHTTPServer):
    """The server. Use it as a context; `url` is its base address."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.logins = {JOB_TOKEN: BOT, "other": "mallory", "human": "octocat", "app": "assay[bot]"}
        self.head = NEW
        self.comments: list[dict[str, Any]] = []
        self.checks: list[dict[str, Any]] = []
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, str]] = []
        self.bodies: list[str] = []
        self.most_characters, self.most_bytes, self.page_cap = 65_536, 262_144, 100
        self.before: Callable[[str, str], None] = lambda _method, _path: None
        self.lock = threading.Lock()
        self._next_id = 1000
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,))

    def __enter__(self) -> FakeGitHub:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()

    def say(self, login: str, body: str) -> int:
        """A comment by somebody; its id."""
        self._next_id += 1
        link = f"https://github.example/{REPOSITORY}/pull/7#issuecomment-{self._next_id}"
        self.comments.append({"id": self._next_id, "user": {"login": login}, "body": body, "html_url": link})
        return self._next_id

    def of(self, login: str) -> list[str]:
        """Bodies of somebody's comments."""
        return [one["body"] for one in self.comments if (one["user"] or {}).get("login") == login]

    def count(self, method: str, part: str = "") -> int:
        """How many requests there were."""
        return sum(one == method and part in path for one, path in self.requests)

    # ---- what a request comes to: status, document, headers ------------------------------------------------------

    def refusal(self, token: str) -> Answer:
        return 401, {"message": f"Bad credentials {token}"}, {}

    def answer(self, method: str, target: str, login: str, sent: dict[str, Any]) -> Answer:
        parts = urlsplit(target)
        path, query = parts.path, {name: values[0] for name, values in parse_qs(parts.query).items()}
        self.requests.append((method, path))
        fault = next((one for one in self.faults if one.method in ("*", method) and one.path in path), None)
        if fault is not None:
            self.faults.remove(fault)
            if fault.taken:
                self._real(method, path, query, login, sent)
            return fault.status, {"message": fault.message}, fault.headers
        return self._real(method, path, query, login, sent)

    def _real(self, method: str, path: str, query: dict[str, str], login: str, sent: dict[str, Any]) -> Answer:
        if path == "/user":
            if login.endswith("[bot]"):
                return 403, {"message": "Resource not accessible by integration"}, {}
            return 200, {"login": login}, {}
        at = path.removeprefix(f"/repos/{REPOSITORY}")
        text = sent.get("body") or sent.get("output", {}).get("summary", "")
        if len(text.encode("utf-16-le")) // 2 > self.most_characters or len(text.encode()) > self.most_bytes:
            return 422, {"message": f"Body is too long (maximum is {self.most_characters} characters)"}, {}
        if text:
            self.bodies.append(text)
        if at == "/pulls/7":
            return 200, {"head": {"sha": self.head}}, {}
        if at == "/issues/7/comments":
            if method == "POST":
                self.say(login, text)
                return 201, self.comments[-1], {}
            return self._page(path, query, self.comments, lambda rows: rows)
        if found := re.fullmatch(r"/issues/comments/(\d+)", at):
            return self._one(method, self.comments, int(found[1]), login, {"body": text})
        if at == "/check-runs" and method == "POST":
            self._next_id += 1
            self.checks.append({**sent, "id": self._next_id, "html_url": f"https://github.example/c/{self._next_id}"})
            return 201, self.checks[-1], {}
        if found := re.fullmatch(r"/check-runs/(\d+)", at):
            return self._one(method, self.checks, int(found[1]), login, sent)
        if found := re.fullmatch(r"/commits/([0-9a-f]+)/check-runs", at):
            rows = [c for c in self.checks if c["head_sha"] == found[1] and c["name"] == query["check_name"]]
            return self._page(path, query, rows, lambda rows: {"total_count": len(rows), "check_runs": rows})
        return 404, {"message": "Not Found"}, {}

    def _page(self, path: str, query: dict[str, str], rows: list[Any], form: Callable[[list[Any]], Any]) -> Answer:
        size, page = min(int(query.get("per_page", 30)), self.page_cap), int(query.get("page", 1))
        more = "&".join(f"{name}={value}" for name, value in query.items() if name != "page")
        following = f'<{self.url}{path}?{more}&page={page + 1}>; rel="next"'
        headers = {"Link": following} if page * size < len(rows) else {}
        return 200, form(rows[(page - 1) * size : page * size]), headers

    def _one(self, method: str, rows: list[dict[str, Any]], wanted: int, login: str, sent: dict[str, Any]) -> Answer:
        row = next((one for one in rows if one["id"] == wanted), None)
        if row is None:
            return 404, {"message": "Not Found"}, {}
        if "user" in row and row["user"]["login"] != login:
            return 403, {"message": "Must have admin rights"}, {}
        if method == "DELETE":
            rows.remove(row)
            return 204, None, {}
        row.update(sent)
        return 200, row, {}


class _Handler(BaseHTTPRequestHandler):
    server: FakeGitHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def _serve(self) -> None:
        sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.before(self.command, self.path)
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        with self.server.lock:
            login = self.server.logins.get(token)
            status, document, headers = (
                self.server.refusal(token)
                if login is None
                else self.server.answer(self.command, self.path, login, json.loads(sent) if sent else {})
            )
        body = json.dumps(document).encode() if status != 204 else b""
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = do_PATCH = do_DELETE = _serve  # noqa: N815 - the names that http.server calls
