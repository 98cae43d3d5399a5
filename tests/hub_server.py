"""A small Hugging Face hub on 127.0.0.1: enough of its HTTP API for `snapshot_download` and `datasets.load_dataset`.

    with HubServer(folder) as hub:              # folder/models/OWNER/NAME/..., folder/datasets/OWNER/NAME/...
        subprocess.run(..., env={**os.environ, **hub.environment(cache)})

Clients are sent to it by HF_ENDPOINT, which libraries read when they are imported; so they run in a process of their
own, and nothing above HTTP is replaced. Every repository has one commit, a hash of its files: changing a file moves
`main`. What goes wrong on a real hub is set by attributes, which may be changed at any time.
"""

import hashlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import parse_qs, unquote, urlsplit


class HubServer:
    """Serves the repositories under `root`. Use it as a context manager; `url` is where it listens."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.requests: list[str] = []  # "GET /api/models/owner/name", in the order of arrival
        self.gated: set[str] = set()  # repositories that answer as if their conditions were not accepted
        self.token: str | None = None  # when set, requests without it find nothing
        self.bytes_per_s: float | None = None  # slows down every download
        self.cut_after: int | None = None  # closes the connection after this many bytes of a file, once
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "HubServer":
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def environment(self, cache: Path) -> dict[str, str]:
        """Variables for a client process that knows only this hub and keeps what it fetches in `cache`."""
        names = {"HF_ENDPOINT": self.url, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "0", "HF_DATASETS_OFFLINE": "0",
                 "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "*", "no_proxy": "*"}  # fmt: skip
        return names | ({"HF_TOKEN": self.token} if self.token else {})

    def files(self, kind: str, name: str) -> dict[str, Path]:
        """Path in the repository -> file, sorted; empty when there is no such repository."""
        folder = self.root / kind / name
        return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}

    def commit(self, kind: str, name: str) -> str:
        """40 hex digits that change with any file of the repository."""
        digest = hashlib.sha1()
        for path, file in self.files(kind, name).items():
            digest.update(path.encode() + hashlib.sha256(file.read_bytes()).digest())
        return digest.hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: ClassVar[HubServer]
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def log_message(self, *arguments: object) -> None:
        """Nothing: the tests read `requests`."""

    def _answer(self) -> None:
        parts = urlsplit(self.path)
        path = unquote(parts.path)
        self.hub.requests.append(f"{self.command} {path}")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        steps = path.strip("/").split("/")
        if steps[:1] == ["api"] and len(steps) >= 4:
            self._api(steps[1], f"{steps[2]}/{steps[3]}", steps[4:], body, parse_qs(parts.query))
        elif "resolve" in steps:
            kind = steps.pop(0) if steps[0] in ("datasets", "spaces") else "models"
            self._resolve(kind, "/".join(steps[:2]), steps[3], "/".join(steps[4:]))
        else:
            self._fail(404, "EntryNotFound", "Not here")

    def _refused(self, kind: str, name: str, revision: str) -> bool:
        """Answers what must not or cannot be served."""
        wanted = f"Bearer {self.hub.token}"
        if not self.hub.files(kind, name) or (self.hub.token and self.headers.get("Authorization") != wanted):
            self._fail(401 if self.hub.token is None else 404, "RepoNotFound", "Repository not found")
        elif name in self.hub.gated:
            self._fail(403, "GatedRepo", f"Access to {name} is restricted. You must be authenticated and have accepted its conditions.")
        elif revision not in ("main", self.hub.commit(kind, name)):
            self._fail(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        else:
            return False
        return True

    def _api(self, kind: str, name: str, rest: list[str], body: bytes, query: dict[str, list[str]]) -> None:
        action = rest[0] if rest else "revision"
        revision = rest[1] if len(rest) > 1 else "main"
        if self._refused(kind, name, revision):
            return
        files = self.hub.files(kind, name)
        if action == "revision":
            self._json({"id": name, "sha": self.hub.commit(kind, name), "private": False, "gated": False, "disabled": False, "tags": [],
                        "downloads": 0, "likes": 0, "siblings": [{"rfilename": path} for path in files]})  # fmt: skip
        elif action == "tree":
            self._tree(files, "/".join(rest[2:]), recursive=query.get("recursive", [""])[0].lower() in ("true", "1"))
        elif action == "paths-info":
            asked = json.loads(body)["paths"] if self.headers.get_content_type() == "application/json" else parse_qs(body.decode())["paths"]
            self._json([entry for path in asked for entry in _entries(files, path)])
        else:
            self._fail(404, "EntryNotFound", f"No such part of the API: {action}")

    def _tree(self, files: dict[str, Path], folder: str, recursive: bool) -> None:
        inside = {path: file for path, file in files.items() if not folder or path.startswith(folder + "/")}
        if folder and not inside:
            self._fail(404, "EntryNotFound", f"{folder} does not exist")
            return
        start = len(folder) + 1 if folder else 0
        folders = {path[: start + path[start:].index("/")] for path in inside if "/" in path[start:]}
        shown = inside if recursive else {path: file for path, file in inside.items() if "/" not in path[start:]}
        self._json([{"type": "directory", "oid": "0" * 40, "size": 0, "path": path} for path in sorted(folders)]
                   + [entry for path in shown for entry in _entries(shown, path)])  # fmt: skip

    def _resolve(self, kind: str, name: str, revision: str, path: str) -> None:
        if self._refused(kind, name, revision):
            return
        file = self.hub.files(kind, name).get(path)
        if file is None:
            self._fail(404, "EntryNotFound", f"{path} does not exist")
            return
        size = file.stat().st_size
        first, last = 0, size - 1
        asked = self.headers.get("Range", "")
        if asked.startswith("bytes="):
            begin, _, end = asked.removeprefix("bytes=").partition("-")
            first, last = (int(begin), min(int(end or last), last)) if begin else (max(0, size - int(end)), last)
        if first > last and asked:
            self._fail(416, "RangeNotSatisfiable", f"{path} has {size} bytes")
            return
        self.send_response(206 if asked else 200)
        self.send_header("ETag", f'"{hashlib.sha256(file.read_bytes()).hexdigest()}"')
        self.send_header("X-Repo-Commit", self.hub.commit(kind, name))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(last - first + 1))
        if asked:
            self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
        self.end_headers()
        if self.command != "HEAD":
            self._send(file, first, last)

    def _send(self, file: Path, first: int, last: int) -> None:
        chunk = 1 << 16 if self.hub.bytes_per_s is None else max(1, int(self.hub.bytes_per_s / 20))
        sent = 0
        with file.open("rb") as source:
            source.seek(first)
            while first + sent <= last:
                data = source.read(min(chunk, last + 1 - first - sent))
                if self.hub.cut_after is not None and sent + len(data) > self.hub.cut_after:
                    self.wfile.write(data[: self.hub.cut_after - sent])
                    self.hub.cut_after = None
                    self.close_connection = True
                    return
                self.wfile.write(data)
                sent += len(data)
                if self.hub.bytes_per_s is not None:
                    time.sleep(len(data) / self.hub.bytes_per_s)

    def _json(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _fail(self, status: int, code: str, text: str) -> None:
        body = json.dumps({"error": text}).encode()
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", text)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _entries(files: dict[str, Path], path: str) -> list[dict]:
    """What the tree says of one path: a file, a folder, or nothing."""
    if path in files:
        content = files[path].read_bytes()
        blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        return [{"type": "file", "oid": blob, "size": len(content), "path": path}]
    if any(name.startswith(path + "/") for name in files):
        return [{"type": "directory", "oid": "0" * 40, "size": 0, "path": path}]
    return []
