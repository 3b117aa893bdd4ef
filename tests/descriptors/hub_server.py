"""A small server that speaks the part of the Hugging Face Hub's interface that models need."""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HubServer(ThreadingHTTPServer):
    """Repositories in memory: file contents by repository and name."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.requests: list[str] = []
        self.token = "hf_test"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *args) -> None:
        pass

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def answer_json(self, content: object, status: int = 200) -> None:
        self.answer(status, json.dumps(content).encode(), Content_Type="application/json")

    def missing(self, code: str) -> None:
        self.answer(404, b"{}", X_Error_Code=code, X_Error_Message="not found")

    def do_POST(self) -> None:
        path = self.path.partition("?")[0]
        self.server.requests.append(f"POST {path}")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Authorization") != f"Bearer {self.server.token}":
            self.answer_json({"error": "Invalid username or password."}, 401)
        elif path == "/api/repos/create":
            given = json.loads(body)
            name = "/".join(filter(None, [given.get("organization"), given["name"]]))
            self.server.repositories.setdefault(name, {})
            self.answer_json({"url": f"{self.server.url}/{name}", "name": name, "id": name})
        elif path == "/api/validate-yaml":
            self.answer_json({"errors": [], "warnings": []})
        elif "/preupload/" in path:
            files = json.loads(body)["files"]
            modes = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in files
            ]
            self.answer_json({"files": modes})
        elif "/commit/" in path:
            name = path.removeprefix("/api/models/").partition("/commit/")[0]
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    content = base64.b64decode(entry["value"]["content"])
                    self.server.repositories[name][entry["value"]["path"]] = content
            url = f"{self.server.url}/{name}/commit/{COMMIT}"
            self.answer_json({"success": True, "commitOid": COMMIT, "commitUrl": url})
        else:
            self.missing("RepoNotFound")

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.server.requests.append(f"{self.command} {path}")
        kept = self.server.repositories
        if path.startswith("/api/models/"):
            name = "/".join(path.split("/")[3:5])
            if name not in kept:
                self.missing("RepoNotFound")
            elif "/tree/" in path:
                self.answer_json(
                    [
                        {"type": "file", "path": file, "size": len(content), "oid": _etag(content)}
                        for file, content in kept[name].items()
                    ]
                )
            else:
                siblings = [{"rfilename": file} for file in kept[name]]
                facts = {"id": name, "modelId": name, "sha": COMMIT, "siblings": siblings}
                self.answer_json({**facts, "private": False, "tags": [], "downloads": 0})
            return
        name, _, rest = path.lstrip("/").partition("/resolve/")
        file = rest.partition("/")[2]
        if file not in kept.get(name, {}):
            self.missing("EntryNotFound" if name in kept else "RepoNotFound")
            return
        content = kept[name][file]
        self.answer(200, content, ETag=f'"{_etag(content)}"', X_Repo_Commit=COMMIT)

    do_HEAD = do_GET


def _etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
