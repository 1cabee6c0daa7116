"""A stand-in for Kubernetes' control plane, for machines without one: kubectl and the nodes of a lab talk to it.

It serves, over HTTPS on loopback, what they ask for: discovery, create, get and list with selectors, merge patches,
delete with propagation and grace, evictions, tokens and roles. It has no watches, because none is asked for.
``controllers.py`` does what a cluster does by itself. The tests of this folder run on a real control plane too.
"""

from __future__ import annotations

import json
import secrets
import ssl
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

from tests.kubernetes.controllers import Controllers, disrupt
from tests.kubernetes.kubelets import Client
from tests.kubernetes.store import ADMIN, KINDS, ApiError, Kind, Object, Place, Store, allow, selected
from tests.ports import free_port

#: A node is unreachable if another one has renewed its lease so often since it has. The lab's nodes do it each second.
_SILENCE = 4
_VERBS = ["create", "delete", "get", "list", "patch"]
_SUCCESS = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
#: A server answers a deletion of these with the object, also if nothing is left of it.
_SHOWN = ("pods", "services")
_VERSION = {"major": "1", "minor": "36", "gitVersion": "v1.36.0"}


class Standin:
    """A control plane with an empty cluster.

    Args:
        folder: for its certificate.
        users: users other than the administrator, with the rights that roles give them.
    """

    def __init__(self, folder: Path, users: tuple[str, ...]) -> None:
        self._certificate = folder / "standin.pem"
        self._tokens = {name: secrets.token_hex(16) for name in (ADMIN, *users)}
        self.store = Store()
        self._controllers = Controllers(self.store, _SILENCE)
        self._port = free_port()
        self._server: ThreadingHTTPServer | None = None

    def client(self, user: str = ADMIN) -> Client:
        return Client(url=f"https://127.0.0.1:{self._port}", token=self._tokens[user])

    def start(self, *, controllers: bool = True) -> None:
        """Start; returns when it answers. Without controllers, nothing happens by itself."""
        words = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=localhost -days 2"
        files = ("-keyout", self._certificate, "-out", f"{self._certificate}.crt")
        subprocess.run((*words.split(), *files), check=True, capture_output=True)
        for name in ("default", "kube-node-lease"):
            self.store.create("namespaces", "", {"metadata": {"name": name}})
        self.start_server()
        if controllers:
            self._controllers.start()

    def start_server(self) -> None:
        """Answer again, at the same port."""
        users = {token: name for name, token in self._tokens.items()}
        handler = type("Handler", (_Handler,), {"store": self.store, "users": users})
        self._controllers.forgive()
        self._server = _Server(("127.0.0.1", self._port), handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(f"{self._certificate}.crt", self._certificate)
        # The handshake belongs to the connection's own thread: a client that sends nothing must not hold the others.
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        threading.Thread(target=self._server.serve_forever, args=(0.05,), name="standin", daemon=True).start()

    def stop_server(self) -> None:
        """Stop answering; the cluster itself continues."""
        if self._server:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def stop(self) -> None:
        if self._controllers.is_alive:
            self._controllers.stop()
        self.stop_server()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves early is no error."""


class _Handler(BaseHTTPRequestHandler):
    """Answers one request a connection."""

    store: ClassVar[Store]
    users: ClassVar[dict[str, str]]

    def log_message(self, *_: Any) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        self._answer("get")

    def do_POST(self) -> None:
        self._answer("create")

    def do_PATCH(self) -> None:
        self._answer("patch")

    def do_DELETE(self) -> None:
        self._answer("delete")

    def _answer(self, verb: str) -> None:
        try:
            code, value = 201 if verb == "create" else 200, self._do(verb)
        except ApiError as error:
            common = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
            code, value = error.code, {**common, "message": error.message, "reason": error.reason, "code": error.code}
        # An empty message of protocol buffers is a schema without kinds: an old kubectl then checks no fields.
        body = b"" if self.path.startswith("/openapi/v2") else json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _do(self, verb: str) -> Object:
        url = urlsplit(self.path)
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        user = self.users.get(self.headers.get("Authorization", "").removeprefix("Bearer "))
        if user is None:
            raise ApiError(401, "Unauthorized", "Unauthorized")
        if (found := discovery(url.path)) is not None:
            return found
        place = Place(url.path)
        with self.store.lock:
            if not place.name and verb == "get":
                verb = "list"
            allow(self.store, user, verb, place)
            return self._act(verb, place, query, body)

    def _act(self, verb: str, place: Place, query: dict[str, str], body: Object) -> Object:
        resource, kind = place.resource, KINDS[place.resource]
        if verb == "list":
            wanted = (query.get("labelSelector", ""), query.get("fieldSelector", ""))
            found = [one for one in self.store.of(resource, place.namespace) if selected(one, *wanted)]
            # Only the list names the kind of its items.
            items = [{key: one[key] for key in one if key not in ("apiVersion", "kind")} for one in found]
            meta = {"resourceVersion": self.store.version}
            return {"kind": f"{kind.name}List", "apiVersion": kind.group, "metadata": meta, "items": items}
        if verb == "create" and not place.part:
            return self.store.create(resource, place.namespace, body)
        one = self.store.get(resource, place.namespace, place.name)
        if verb == "create":
            disrupt(self.store, one, "EvictionByEvictionAPI", "Eviction API: evicting")
            self.store.delete(resource, one)
            return {**_SUCCESS, "code": 201}
        if verb == "patch":
            if self.headers.get("Content-Type") != "application/merge-patch+json":
                raise ApiError(415, "UnsupportedMediaType", "the stand-in merges only application/merge-patch+json")
            self.store.patch(resource, one, body, place.part)
        if verb == "delete":
            options = {**query, **body}
            grace = options.get("gracePeriodSeconds")
            policy = options.get("propagationPolicy") or "Background"
            self.store.delete(resource, one, policy=policy, grace_s=None if grace is None else int(grace))
            if resource not in _SHOWN and self.store.find(resource, place.namespace, place.name) is None:
                group = kind.group.rpartition("/")[0]
                details = {"name": place.name, "kind": resource, "uid": one["metadata"]["uid"]}
                return {**_SUCCESS, "details": {**details, **({"group": group} if group else {})}}
        return one


def discovery(path: str) -> Object | None:
    """Return what kubectl asks before it knows the names of resources; None: the path is about objects."""
    groups = sorted({kind.group for kind in KINDS.values()} - {"v1"})
    paths = {"/api/v1": "v1", **{f"/apis/{group}": group for group in groups}}
    if path in ("/version", "/readyz", "/openapi/v2"):
        return _VERSION
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(group) for group in groups]}
    if path in paths:
        own = [_resource(kind) for kind in KINDS.values() if kind.group == paths[path]]
        return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": paths[path], "resources": own}
    if path.startswith("/openapi/v3"):
        return _openapi(path, paths)
    return None


def _group(group: str) -> Object:
    name, _, version = group.rpartition("/")
    one = {"groupVersion": group, "version": version}
    return {"name": name, "versions": [one], "preferredVersion": one}


def _resource(kind: Kind) -> Object:
    names = {"name": kind.resource, "singularName": kind.name.lower(), "kind": kind.name}
    return {**names, "namespaced": kind.namespaced, "verbs": _VERBS}


def _openapi(path: str, paths: dict[str, str]) -> Object:
    """Say that the server checks fields itself."""
    if path == "/openapi/v3":
        return {"paths": {key.strip("/"): {"serverRelativeURL": f"/openapi/v3{key}?hash=1"} for key in paths}}
    group = paths.get(path.removeprefix("/openapi/v3"), "")
    name, _, version = group.rpartition("/")
    value = {"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}
    own = {
        f"/{kind.resource}/{{name}}": {
            "patch": {
                "x-kubernetes-group-version-kind": {"group": name, "version": version, "kind": kind.name},
                "parameters": [value],
                "responses": {},
            }
        }
        for kind in KINDS.values()
        if kind.group == group
    }
    return {"openapi": "3.0.0", "info": {"title": "Kubernetes", "version": "v1.36.0"}, "paths": own}
