"""FI-39: a model that cannot be had is refused before anything starts, quickly, with the way out. The Hub is a small
HTTP server on loopback that says what the real one says."""

from __future__ import annotations

import http.server
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hermes_rl_mcp.errors import PreflightError
from hermes_rl_mcp.paths import install_root
from hermes_rl_mcp.runs.forecast import modelcheck
from hermes_rl_mcp.runs.forecast.modelcheck import check_model

CONFIG = {
    **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "vocab_size": 100},
}
COMMIT = "c" * 40
TINY = install_root() / "trainer" / "models" / "tiny"


class _Hub(http.server.BaseHTTPRequestHandler):
    """org/good is open, org/gated needs the token ``good``, anything else is not there."""

    def do_GET(self) -> None:
        name = "/".join(self.path.removeprefix("/api/models").split("/")[1:3]).split("?")[0]
        allowed = self.headers.get("authorization") == "Bearer good"
        if name == "org/good" or (name == "org/gated" and allowed):
            files = [{"rfilename": "model.safetensors", "size": 12_345}, {"rfilename": "config.json", "size": 1}]
            self._answer(200, {"siblings": files} if self.path.startswith("/api/") else CONFIG)
        elif name == "org/gated":
            self._answer(401, {}, {"x-error-code": "GatedRepo"})
        elif name == "org/broken":
            self._answer(503, {})
        else:
            self._answer(401 if not allowed else 404, {}, {"x-error-code": "RepoNotFound"})

    def _answer(self, status: int, body: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"content-length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        """Not into the test's output."""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Variables under which the Hub is that server."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path / "hf")}
    server.shutdown()
    server.server_close()
    thread.join()


def _refused(name: str, environ: dict[str, str]) -> PreflightError:
    before = time.monotonic()
    with pytest.raises(PreflightError) as caught:
        check_model(name, name, environ)
    assert time.monotonic() - before < 100
    assert caught.value.hint
    return caught.value


def _folder(folder: Path, weights: bytes | None = None) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").write_bytes(
        (TINY / "model.safetensors").read_bytes() if weights is None else weights
    )
    return folder


def _cached(environ: dict[str, str], name: str = "org/good") -> Path:
    """A snapshot in the Hub client's cache."""
    repository = Path(environ["HF_HOME"]) / "hub" / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    return _folder(repository / "snapshots" / COMMIT)


def test_fi_39_an_open_model_passes_with_the_shape_and_size_that_the_hub_tells(hub: dict[str, str]) -> None:
    model = check_model("org/good", "org/good", hub)
    assert (model.shape.layers, model.shape.hidden, model.guessed, model.fetch_bytes) == (2, 64, False, 12_345)
    assert model.folder is None


@pytest.mark.parametrize(
    ("name", "token", "says"),
    [
        ("org/gated", None, ["gated", "no HF_TOKEN", "licence", "config set HF_TOKEN"]),
        ("org/gated", "bad", ["gated", "no access", "licence"]),
        ("org/misspelt", None, ["no model 'org/misspelt'", "spelling"]),
        ("org/misspelt", "good", ["no model 'org/misspelt'", "404"]),
        ("org/broken", None, ["503", "later"]),
    ],
)
def test_fi_39_what_the_hub_refuses_is_told_with_what_to_do(
    hub: dict[str, str], name: str, token: str | None, says: list[str]
) -> None:
    text = str(_refused(name, {**hub, **({"HF_TOKEN": token} if token else {})}))
    assert all(part in text for part in says), text


def test_fi_39_the_users_token_opens_a_gated_model_also_from_its_file(hub: dict[str, str]) -> None:
    assert check_model("org/gated", "org/gated", {**hub, "HF_TOKEN": "good"}).shape.layers == 2
    Path(hub["HF_HOME"]).mkdir()
    (Path(hub["HF_HOME"]) / "token").write_text("good\n")
    assert check_model("org/gated", "org/gated", hub).shape.layers == 2


def test_fi_39_a_hub_that_cannot_be_reached_or_never_answers_is_given_up(
    hub: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modelcheck, "ANSWER_S", 0.5)
    silent = socket.create_server(("127.0.0.1", 0))  # takes connections and says nothing
    try:
        for port in (9, silent.getsockname()[1]):
            text = str(_refused("org/good", {**hub, "HF_ENDPOINT": f"http://127.0.0.1:{port}"}))
            assert "cannot be reached" in text and "Connect to the network" in text and "builtin:tiny" in text
    finally:
        silent.close()


def test_fi_39_offline_a_model_that_is_not_cached_is_refused_and_a_whole_one_passes(hub: dict[str, str]) -> None:
    environ = {**hub, "HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9"}
    text = str(_refused("org/good", environ))
    assert "HF_HUB_OFFLINE" in text and "hf download org/good" in text
    snapshot = _cached(environ)
    assert check_model("org/good", "org/good", environ).folder == snapshot


@pytest.mark.parametrize("offline", ["0", "1"])
@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda file: file.write_bytes(b""), "0 bytes"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1000]), "cut short"),
        (lambda file: file.write_bytes(b"\x00" * 64), "cannot be read as safetensors"),
        (lambda file: (file.unlink(), file.symlink_to("gone")), "missing"),
    ],
)
def test_fi_39_a_half_downloaded_cache_is_never_used_and_the_file_is_named(
    hub: dict[str, str], damage: Any, says: str, offline: str
) -> None:
    environ = {**hub, "HF_HUB_OFFLINE": offline}
    file = _cached(environ) / "model.safetensors"
    damage(file)
    error = _refused("org/good", environ)
    assert says in error.message and str(file) in error.message, error.message
    assert f"Remove {file}" in error.hint
    assert error.details["path"] == str(file)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
        (lambda folder: (folder / "config.json").write_text("["), "config.json is no JSON"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no *.safetensors"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b""), "model.safetensors is empty"),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text(
                json.dumps({"weight_map": {"a": "model-00002.safetensors"}})
            ),
            "model-00002.safetensors is missing",
        ),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"{}"),
            "header is longer",
        ),
    ],
)
def test_fi_39_a_folder_that_holds_no_whole_model_is_refused_by_the_name_of_the_file(
    tmp_path: Path, spoil: Any, says: str
) -> None:
    folder = _folder(tmp_path / "model")
    assert check_model(str(folder), str(folder), {}).folder == folder
    spoil(folder)
    assert says in _refused(str(folder), {}).message


def test_fi_39_a_builtin_model_with_both_ways_shut_and_a_folder_that_is_not_there_are_named(tmp_path: Path) -> None:
    environ = {"HF_HUB_OFFLINE": "1", "PIP_NO_INDEX": "1"}
    name, place = "builtin:smollm2-135m", str(tmp_path / "smollm2-135m")
    with pytest.raises(PreflightError, match="both ways"):
        check_model(name, place, environ)
    assert check_model(name, place, {"HF_HUB_OFFLINE": "1"}).fetch_bytes == pytest.approx(270e6, rel=0.02)
    assert "no model folder" in _refused("/no/such/model", {}).message
    assert check_model("builtin:tiny", place, environ).folder == TINY
