"""A hub of Hugging Face on this machine: the few answers that listing and reading a data set need."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit


class LocalHub:
    """Serves data sets, each with commits, as a real hub does.

    Attributes:
        commits: of each data set, the files of each commit by name; the last commit is `main`.
        ranges: every range of bytes that was served: file, first byte, the one behind the last.
        drop: told of each range; true breaks the connection in the middle of it.
    """

    def __init__(self):
        self.commits: dict[str, dict[str, dict[str, bytes]]] = {}
        self.ranges: list[tuple[str, int, int]] = []
        self.closed = False
        self.drop = lambda name, start, stop: False
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.hub = self
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def endpoint(self):
        """What HF_ENDPOINT is set to."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def commit(self, data_set, folder: Path):
        """A new main branch of a data set with the files of a folder; returns its commit."""
        files = {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}
        said = json.dumps({name: hashlib.sha1(content).hexdigest() for name, content in files.items()})
        commit = hashlib.sha1(said.encode()).hexdigest()
        self.commits.setdefault(data_set, {})[commit] = files
        return commit

    def close(self):
        self.closed = True
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def files(self, data_set, revision):
        """The commit that a revision stands for and its files; None where there is none."""
        commits = self.commits.get(data_set, {})
        if revision in (None, "main") and commits:
            revision = list(commits)[-1]
        return (revision, commits[revision]) if revision in commits else None


def _entry(name, content):
    return {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self._answer(body=False)

    def do_GET(self):
        self._answer()

    def do_POST(self):
        raw = self.rfile.read(int(self.headers.get("content-length", 0)))
        try:
            self._asked = json.loads(raw)
        except ValueError:
            self._asked = parse_qs(raw.decode())
        self._answer()

    def _answer(self, body=True):
        if self.server.hub.closed:
            self.close_connection = True
            return None
        parts = [unquote(part) for part in urlsplit(self.path).path.split("/")[1:]]
        if parts[:2] == ["api", "datasets"]:
            return self._api("/".join(parts[2:4]), parts[4:])
        if parts[:1] == ["datasets"] and parts[3:4] == ["resolve"]:
            return self._file("/".join(parts[1:3]), parts[4], "/".join(parts[5:]), body)
        return self._missing("EntryNotFound")

    def _api(self, data_set, rest):
        what = rest[0] if rest else "revision"
        found = self.server.hub.files(data_set, rest[1] if len(rest) > 1 else None)
        if found is None:
            return self._missing(
                "RevisionNotFound" if data_set in self.server.hub.commits else "RepoNotFound"
            )
        commit, files = found
        if what == "revision":
            names = [{"rfilename": name} for name in files]
            return self._json({"id": data_set, "sha": commit, "siblings": names, "private": False})
        if what == "paths-info":
            asked = self._asked["paths"]
            return self._json([_entry(name, files[name]) for name in asked if name in files])
        folder = "/".join(rest[2:])
        inside = {n: c for n, c in files.items() if not folder or n.startswith(folder + "/")}
        if not inside:
            return self._missing("EntryNotFound")
        folders = {str(parent) for name in inside for parent in Path(name).parents} - {".", folder}
        tree = [{"type": "directory", "path": name, "size": 0, "oid": "0"} for name in sorted(folders)]
        return self._json(tree + [_entry(name, content) for name, content in inside.items()])

    def _file(self, data_set, revision, name, body):
        found = self.server.hub.files(data_set, revision)
        if found is None or name not in found[1]:
            known = found is not None or data_set in self.server.hub.commits
            return self._missing("EntryNotFound" if known else "RepoNotFound")
        content = found[1][name]
        start, stop, status = 0, len(content), 200
        if wanted := self.headers.get("range"):
            first, last = wanted.removeprefix("bytes=").split("-")
            start, stop, status = int(first), min(int(last) + 1, len(content)), 206
        self.send_response(status)
        self.send_header("Content-Length", str(stop - start))
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", found[0])
        self.end_headers()
        if not body:
            return
        if status == 206:
            self.server.hub.ranges.append((name, start, stop))
            if self.server.hub.drop(name, start, stop):
                self.wfile.write(content[start : (start + stop) // 2])
                self.wfile.flush()
                self.connection.shutdown(2)
                self.close_connection = True
                return
        self.wfile.write(content[start:stop])

    def _missing(self, code):
        self._json({"error": code}, 404, {"X-Error-Code": code})

    def _json(self, value, status=200, headers=None):
        raw = json.dumps(value).encode()
        self.send_response(status)
        for name, said in (headers or {}).items():
            self.send_header(name, said)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(raw)
