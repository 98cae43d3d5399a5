"""A small hub on this computer: the few addresses that downloading a model asks for. Nothing above HTTP is replaced."""

import hashlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HubServer:
    """`models`: id -> {file: bytes}; `gated` and `private` ids are refused as the hub refuses them."""

    def __init__(self, models: dict[str, dict[str, bytes]], gated: tuple[str, ...] = (), slow: bool = False) -> None:
        self.requests: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._answer(body=True)

            def do_HEAD(self) -> None:
                self._answer(body=False)

            def _answer(self, body: bool) -> None:
                path = urlsplit(self.path).path
                hub.requests.append(f"{self.command} {path}")
                if path.startswith("/api/models/"):
                    owner, name, *rest = path.removeprefix("/api/models/").split("/")
                    return self._api(f"{owner}/{name}", rest)
                model, _, place = path.removeprefix("/").partition("/resolve/")
                content = models.get(model, {}).get(place.partition("/")[2])
                if content is None:
                    return self._refuse(404, "EntryNotFound")
                if model in gated:
                    return self._refuse(403, "GatedRepo")
                headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
                return self._send(200, content, headers, body)

            def _api(self, model: str, rest: list[str]) -> None:
                if model not in models:
                    return self._refuse(401, "RepoNotFound")
                if rest and rest[-1] not in (COMMIT, "main"):
                    return self._refuse(404, "RevisionNotFound")
                files = models[model]
                if rest[:1] == ["tree"]:
                    answer = [{"type": "file", "path": name, "size": len(content), "oid": "0" * 40} for name, content in files.items()]
                else:
                    siblings = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
                    answer = {"id": model, "sha": COMMIT, "siblings": siblings}
                return self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"}, True)

            def _refuse(self, status: int, code: str) -> None:
                headers = {"X-Error-Code": code, "X-Error-Message": "no", "Content-Type": "application/json"}
                self._send(status, b'{"error": "no"}', headers, self.command == "GET")

            def _send(self, status: int, content: bytes, headers: dict[str, str], body: bool) -> None:
                self.send_response(status)
                for name, value in (headers | {"Content-Length": str(len(content))}).items():
                    self.send_header(name, value)
                self.end_headers()
                if body:
                    for start in range(0, len(content), 1 << 20):
                        self.wfile.write(content[start : start + (1 << 20)])
                        time.sleep(0.05 if slow else 0)

            def log_message(self, *_args: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
