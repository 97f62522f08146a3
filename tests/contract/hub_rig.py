"""A Hub of our own on loopback: data sets as folders, served by the few addresses that the Hub's client asks."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "a" * 40


class HubServer(ThreadingHTTPServer):
    """``folders``: data set id to its files. ``asked`` is every path that was asked for."""

    daemon_threads = True

    def __init__(self, folders: dict[str, Path]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folders = folders
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def hub(folders: dict[str, Path]) -> Iterator[HubServer]:
    server = HubServer(folders)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        path = unquote(urlsplit(self.path).path)
        self.server.asked.append(f"{self.command} {self.path}")
        for name, folder in self.server.folders.items():
            if path.startswith(f"/api/datasets/{name}"):
                return self._api(path.removeprefix(f"/api/datasets/{name}"), name, folder, body)
            if path.startswith(f"/datasets/{name}/resolve/"):
                _, _, file = path.removeprefix(f"/datasets/{name}/resolve/").partition("/")
                return self._file(folder / file)
        self._json({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_POST = do_GET

    def _api(self, rest: str, name: str, folder: Path, body: bytes) -> None:
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        if rest.startswith("/tree/"):
            return self._json([_entry(path, folder) for path in self._below(rest, folder)])
        if rest.startswith("/paths-info/"):
            asked = json.loads(body)["paths"] if body.startswith(b"{") else parse_qs(body.decode()).get("paths", [])
            found = [folder / one for one in asked]
            return self._json([_entry(path, folder) for path in found if path.exists()])
        self._json(
            {
                "id": name,
                "sha": COMMIT,
                "private": False,
                "gated": False,
                "disabled": False,
                "downloads": 0,
                "likes": 0,
                "tags": [],
                "siblings": [{"rfilename": str(path.relative_to(folder))} for path in files],
            }
        )

    def _below(self, rest: str, folder: Path) -> list[Path]:
        inside = "/".join(rest.split("/")[3:])
        recursive = "recursive=true" in self.path.lower()
        return sorted((folder / inside).rglob("*") if recursive else (folder / inside).glob("*"))

    def _file(self, path: Path) -> None:
        if not path.is_file():
            return self._json({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
        data = path.read_bytes()
        begin, end = 0, len(data)
        if (wanted := self.headers.get("Range", "")).startswith("bytes="):
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            begin, end = int(first), min(end, int(last) + 1 if last else end)
        headers = {
            "ETag": f'"{hashlib.sha256(data).hexdigest()}"',
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
            "Content-Range": f"bytes {begin}-{end - 1}/{len(data)}",
        }
        self._send(206 if wanted else 200, data[begin:end], "application/octet-stream", headers)

    def _json(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self._send(status, json.dumps(value).encode(), "application/json", headers or {})

    def _send(self, status: int, data: bytes, kind: str, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing on stderr: pytest shows what was asked if a test fails."""


def _entry(path: Path, folder: Path) -> dict[str, Any]:
    name = str(path.relative_to(folder))
    if path.is_dir():
        return {"type": "directory", "oid": "b" * 40, "size": 0, "path": name}
    return {
        "type": "file",
        "oid": hashlib.sha1(path.read_bytes()).hexdigest(),
        "size": path.stat().st_size,
        "path": name,
    }
