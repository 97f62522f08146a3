"""The server's entry in clients' files: what stands in it, and that nothing else in a file is touched."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_rl_mcp.cli import client_files, jsonc, yamlplaces
from hermes_rl_mcp.cli.client_files import merged, write
from hermes_rl_mcp.cli.clients import CLIENTS, absolute_flags, client_file, entry, server_command, surroundings
from hermes_rl_mcp.errors import HermesRLError, InvalidValueError

VARIABLES = {"HERMES_HOME": "/home/u/.hermes"}


def entry_of(name: str, *flags: str) -> dict[str, Any]:
    return entry(CLIENTS[name], VARIABLES, flags)


@pytest.mark.parametrize("name", CLIENTS)
def test_an_entry_starts_this_installation_over_stdio_by_absolute_paths(name: str) -> None:
    made = entry_of(name)
    assert os.access(made["command"], os.X_OK)
    assert Path(made["command"]).is_absolute()
    assert Path(made["command"]).parent == Path(sys.executable).parent
    assert made["args"] == ["--transport", "stdio"]
    assert made["env"] == VARIABLES
    assert (made.get("type") == "stdio") == CLIENTS[name].typed


def test_each_client_has_a_file_of_its_own_on_both_systems(tmp_path: Path) -> None:
    environ = {"HOME": "/home/u", "HERMES_HOME": "/data/hermes"}
    linux = {name: str(client_file(name, environ, "linux")) for name in CLIENTS}
    assert linux == {
        "claude-desktop": "/home/u/.config/Claude/claude_desktop_config.json",
        "claude-code": "/home/u/.claude.json",
        "cursor": "/home/u/.cursor/mcp.json",
        "hermes": "/data/hermes/config.yaml",
        "vscode": "/home/u/.config/Code/User/mcp.json",
        "inspector": "/home/u/.mcp-inspector/mcp.json",
    }
    desktop = client_file("claude-desktop", environ, "darwin")
    assert str(desktop) == "/home/u/Library/Application Support/Claude/claude_desktop_config.json"
    assert str(client_file("vscode", {**environ, "XDG_CONFIG_HOME": "/x"}, "linux")) == "/x/Code/User/mcp.json"
    assert str(client_file("claude-code", {**environ, "CLAUDE_CONFIG_DIR": "/c"}, "linux")) == "/c/.claude.json"


def test_a_server_without_its_command_is_started_by_its_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setenv("PATH", "/nowhere")
    assert server_command() == ["/nowhere/python", "-P", "-m", "hermes_rl_mcp.server"]


def test_settings_of_the_shell_are_carried_and_secrets_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    environ = {
        "HERMES_HOME": "/h",
        "HF_HOME": "cache",
        "HERMES_RL_ENV_DIRS": f"mine{os.pathsep}/theirs",
        "HERMES_RL_PROFILE": "hermes",
        "HERMES_RL_TRANSPORT": "sse",
        "HERMES_RL_TOKEN": "t0ken-t0ken-t0ken",
        "HF_TOKEN": "hf_aaaaaaaaaaaaaaaaaaaaaaaa",
        "HTTPS_PROXY": "http://me:s3cret@proxy:8080",
        "CUDA_VISIBLE_DEVICES": "1",
        "HF_HUB_OFFLINE": "1",
        "EDITOR": "vi",
    }
    found = surroundings(environ, {"CUDA_VISIBLE_DEVICES": "0", "HF_HUB_OFFLINE": "1"})
    assert found.variables == {
        "HERMES_HOME": "/h",
        "HF_HOME": str(tmp_path / "cache"),
        "HERMES_RL_ENV_DIRS": f"{tmp_path / 'mine'}{os.pathsep}/theirs",
        "HERMES_RL_PROFILE": "hermes",
    }
    assert [sentence.split()[0] for sentence in found.left_out] == ["CUDA_VISIBLE_DEVICES", "HF_TOKEN", "HTTPS_PROXY"]
    assert not any("s3cret" in sentence or "hf_aaaa" in sentence for sentence in found.left_out)
    assert "hermes-rl config set HF_TOKEN -" in found.left_out[1]


def test_flags_keep_their_meaning_in_another_folder_and_those_of_http_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ["--env-dir", "envs", "--config=c.yaml", "--read-only", "--lock", "lora_rank=8"]
    assert absolute_flags(flags) == [
        *("--env-dir", str(tmp_path / "envs"), f"--config={tmp_path / 'c.yaml'}"),
        *("--read-only", "--lock", "lora_rank=8"),
    ]
    for flag in ("--transport", "--port=9", "--token-file"):
        with pytest.raises(InvalidValueError, match="over HTTP"):
            entry_of("cursor", flag)
    with pytest.raises(InvalidValueError, match="has no flag --read-onyl"):
        entry_of("cursor", "--read-onyl")


JSON_FILES = [
    "",
    "  \n",
    "{}",
    "{\n}\n",
    '{"a": 1}',
    '{"mcpServers": {}}\n',
    '{\n\t"mcpServers": {\n\t\t"x": {"command": "y", "n": 1.50}\n\t},\n'
    '\t"z": ["\\ud83d", 1e400, -0, 12345678901234567890]\n}\n',
    '{\r\n  "b": null,\r\n  "mcpServers": {\r\n    "hermes-rl": {"url": "http://localhost"},\r\n'
    '    "k": {}\r\n  }\r\n}',
    '\ufeff{"a": {"mcpServers": {"x": 1}}}',
]


@pytest.mark.parametrize("text", JSON_FILES, ids=range(len(JSON_FILES)))
def test_a_json_file_gets_the_entry_and_keeps_every_other_character(text: str) -> None:
    made = merged(CLIENTS["cursor"], text, "hermes-rl", entry_of("cursor"))
    before: dict[str, Any] = json.loads(text.lstrip("\ufeff") or "{}") if text.strip() else {}
    after = json.loads(made.lstrip("\ufeff"))
    assert after["mcpServers"].pop("hermes-rl") == entry_of("cursor")
    before.get("mcpServers", {}).pop("hermes-rl", None)
    assert after == {"mcpServers": {}, **before}
    assert list(after)[: len(before)] == list(before)
    assert made.count("\r\n") == (made.count("\n") if "\r\n" in text else 0)
    for part in ('"n": 1.50', '["\\ud83d", 1e400, -0, 12345678901234567890]', "\ufeff"):
        assert (part in made) == (part in text)


def test_comments_stay_in_the_file_of_vscode_and_break_the_others() -> None:
    text = '// mine\n{\n  // list\n  "servers": {\n    "a": {"command": "b",}, /* a */\n  },\n}\n'
    made = merged(CLIENTS["vscode"], text, "hermes-rl", entry_of("vscode"))
    for part in ("// mine\n", "// list\n", '"a": {"command": "b",}', "/* a */"):
        assert part in made
    loaded = jsonc.parse(made, relaxed=True).value
    assert loaded == {"servers": {"a": {"command": "b"}, "hermes-rl": entry_of("vscode")}}
    with pytest.raises(jsonc.JsonProblemError):
        merged(CLIENTS["cursor"], text.replace("servers", "mcpServers"), "hermes-rl", entry_of("cursor"))


YAML_FILES = [
    "# only a comment\n",
    "model: x  # y\n",
    "a: 1\nmcp_servers:\n",
    "a: 1\nmcp_servers: {}  # none\nb: 2  # c\n",
    "mcp_servers:  # mine\n  time:\n    command: uvx\n# end\nz: 1",
    "mcp_servers:\n    hermes-rl:\n        command: uvx\n        args: [a]\n    # after\n    b: {command: c}\n",
    "mcp_servers: {b: {command: c}}\n",
    '{"a": 1, "mcp_servers": {"hermes-rl": {"command": "c"}, "d": {}}}\n',
    "%YAML 1.1\n---\na: &x [1, 2]\nb: *x\n",
    "text: |\n  mcp_servers:\n    hermes-rl: no\n",
    "a: 1\r\nmcp_servers:\r\n  b:\r\n    command: c\r\n",
]


@pytest.mark.parametrize("text", YAML_FILES, ids=range(len(YAML_FILES)))
def test_a_yaml_file_gets_the_entry_and_keeps_its_comments(text: str) -> None:
    made = merged(CLIENTS["hermes"], text, "hermes-rl", entry_of("hermes"))
    before, after = yaml.safe_load(text) or {}, yaml.safe_load(made)
    assert after["mcp_servers"].pop("hermes-rl") == entry_of("hermes")
    others = dict(before.get("mcp_servers") or {})
    others.pop("hermes-rl", None)
    assert after == {**before, "mcp_servers": others}
    comments = [line[line.index("#") :] for line in text.splitlines() if "#" in line]
    assert all(comment in made for comment in comments)
    assert made.count("\r\n") == (made.count("\n") if "\r\n" in text else 0)


@pytest.mark.parametrize(
    ("client", "text"),
    [
        ("cursor", "[]"),
        ("cursor", "{"),
        ("cursor", '{"a": 1,}'),
        ("cursor", '{"a": 1} {"b": 2}'),
        ("cursor", '{"a": 1, "a": 2}'),
        ("cursor", '{"mcpServers": ["x"]}'),
        ("cursor", '{"mcpServers": null}'),
        ("cursor", '{"a": NaN}'),
        ("cursor", '{"a": 01}'),
        ("cursor", '{"a": "\n"}'),
        ("cursor", '{"a": ' + "[" * 5000 + "]" * 5000 + "}"),
        ("hermes", "- a\n"),
        ("hermes", "a: [1\n"),
        ("hermes", "a: 1\n---\nb: 2\n"),
        ("hermes", "mcp_servers: text\n"),
        ("hermes", "a: 1\n...\n"),
        ("hermes", "x: &m {}\nmcp_servers: *m\ny: *m\n"),
        ("hermes", "\tmcp_servers: {}\n"),
    ],
)
def test_a_file_that_is_not_what_it_should_be_is_refused_and_not_touched(
    tmp_path: Path, client: str, text: str
) -> None:
    file = tmp_path / "file"
    file.write_text(text)
    with pytest.raises(InvalidValueError, match="was not changed") as refused:
        write(CLIENTS[client], file, "hermes-rl", entry_of(client))
    assert "--write" in refused.value.hint
    assert file.read_text() == text
    assert os.listdir(tmp_path) == ["file"]


def test_what_is_nested_too_deep_is_named_and_what_is_not_is_read() -> None:
    assert jsonc.parse("[" * 100 + "]" * 100).value
    with pytest.raises(jsonc.JsonProblemError, match="line 1, column 202: nested more than 200 deep"):
        jsonc.parse("[" * 300 + "]" * 300)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b'{"a": "\xff"}')
    with pytest.raises(InvalidValueError, match="was not changed"):
        write(CLIENTS["cursor"], file, "hermes-rl", entry_of("cursor"))


def test_what_the_user_added_to_our_entry_stays() -> None:
    own = {"command": "/old/bin/hermes-rl-mcp", "args": ["--read-only"], "env": {"A": "b"}, "disabled": True}
    text = json.dumps({"mcpServers": {"hermes-rl": own}})
    again = json.loads(merged(CLIENTS["cursor"], text, "hermes-rl", entry_of("cursor")))["mcpServers"]["hermes-rl"]
    assert again == {
        **entry_of("cursor"),
        "args": ["--read-only"],
        "env": {"A": "b", **VARIABLES},
        "disabled": True,
    }
    other = json.dumps({"mcpServers": {"hermes-rl": {**own, "command": "uvx", "args": ["hermes-rl-mcp"]}}})
    again = json.loads(merged(CLIENTS["cursor"], other, "hermes-rl", entry_of("cursor")))["mcpServers"]["hermes-rl"]
    assert again["args"] == ["--transport", "stdio"]  # those were uvx's
    new = entry_of("cursor", "--tools", "rl_list_runs")
    again = json.loads(merged(CLIENTS["cursor"], text, "hermes-rl", new))["mcpServers"]["hermes-rl"]
    assert again["args"] == new["args"]
    hermes = "mcp_servers: {hermes-rl: {command: /x/hermes-rl-mcp, timeout: 60}}"
    assert yaml.safe_load(merged(CLIENTS["hermes"], hermes, "hermes-rl", entry_of("hermes")))["mcp_servers"][
        "hermes-rl"
    ] == {**entry_of("hermes"), "timeout": 60}


@pytest.mark.parametrize("name", ["cursor", "hermes"])
def test_an_entry_that_says_the_same_in_another_form_is_left_as_it_is(name: str) -> None:
    client = CLIENTS[name]
    text = json.dumps({client.container: {"hermes-rl": entry_of(name)}}, separators=(",", ": "))
    assert merged(client, text, "hermes-rl", entry_of(name)) == text


def test_a_new_file_is_its_owners_alone_and_the_same_entry_again_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "new" / "mcp.json"
    done = write(CLIENTS["cursor"], file, "hermes-rl", entry_of("cursor"))
    assert (done.changed, done.backup) == (True, None)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    before = file.stat().st_mtime_ns
    assert write(CLIENTS["cursor"], file, "hermes-rl", entry_of("cursor")).changed is False
    assert file.stat().st_mtime_ns == before
    assert os.listdir(file.parent) == ["mcp.json"]


def test_what_was_there_before_is_kept_for_its_owner_and_a_link_stays_a_link(tmp_path: Path) -> None:
    real = tmp_path / "dotfiles" / "mcp.json"
    real.parent.mkdir()
    real.write_text('{"mcpServers": {"x": {"env": {"KEY": "s3cret"}}}}')
    real.chmod(0o640)
    link = tmp_path / "mcp.json"
    link.symlink_to(real)
    backups = [write(CLIENTS["cursor"], link, name, entry_of("cursor")).backup for name in ("one", "two")]
    assert link.is_symlink()
    assert stat.S_IMODE(real.stat().st_mode) == 0o640
    assert list(json.loads(real.read_text())["mcpServers"]) == ["x", "one", "two"]
    assert len(set(backups)) == 2
    for backup, servers in zip(backups, (["x"], ["x", "one"]), strict=True):
        assert backup is not None
        assert backup.parent == real.parent
        assert stat.S_IMODE(backup.stat().st_mode) == 0o600
        assert list(json.loads(backup.read_text())["mcpServers"]) == servers


def test_what_the_client_writes_meanwhile_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mcp.json"
    file.write_text('{"mcpServers": {}}')
    kept, interfered = client_files._kept, []

    def keep(target: Path, data: bytes) -> Path:
        if not interfered:
            interfered.append(True)
            target.write_text('{"mcpServers": {}, "new": 1}')
        return kept(target, data)

    monkeypatch.setattr(client_files, "_kept", keep)
    done = write(CLIENTS["cursor"], file, "hermes-rl", entry_of("cursor"))
    assert json.loads(file.read_text())["new"] == 1
    assert sorted(os.listdir(tmp_path)) == sorted(["mcp.json", Path(done.backup or "").name])

    def always(target: Path, data: bytes) -> Path:
        target.write_text(json.dumps({"n": len(interfered)}))
        interfered.append(True)
        return kept(target, data)

    monkeypatch.setattr(client_files, "_kept", always)
    with pytest.raises(HermesRLError, match="all the time"):
        write(CLIENTS["cursor"], file, "other", entry_of("cursor"))


def test_a_file_that_cannot_be_written_says_so_and_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(HermesRLError, match="cannot be written") as refused:
        write(CLIENTS["cursor"], tmp_path / "folder", "hermes-rl", entry_of("cursor"))
    assert "--write" in refused.value.hint


_json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=50, deadline=None)
@given(
    st.dictionaries(st.text(), _json_values, max_size=4),
    st.dictionaries(st.text(), _json_values, max_size=3),
    st.sampled_from([None, 1, "\t"]),
)
def test_any_json_object_can_be_added_to(
    rest: dict[str, Any], servers: dict[str, Any], indent: int | str | None
) -> None:
    whole = {**rest, "mcpServers": servers}
    text = json.dumps(whole, indent=indent)
    made = jsonc.with_member(text, "mcpServers", "hermes-rl", {"command": "c"})
    expected = {**whole, "mcpServers": {**servers, "hermes-rl": {"command": "c"}}}
    assert json.loads(made) == jsonc.parse(made).value == expected


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.text(alphabet="abc:# '\"-", max_size=4), _json_values, max_size=3), st.booleans())
def test_any_yaml_mapping_is_added_to_or_refused(rest: dict[str, Any], flow: bool) -> None:
    text = yaml.safe_dump(rest, default_flow_style=flow, allow_unicode=True)
    try:
        made = yamlplaces.with_member(text, "mcp_servers", "hermes-rl", {"command": "c"})
    except yamlplaces.YamlProblemError:
        return
    before = yaml.safe_load(text) or {}
    assert yaml.safe_load(made) == {**before, "mcp_servers": {"hermes-rl": {"command": "c"}}}
