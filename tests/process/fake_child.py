"""A stand-in for one of the three processes of a run: ``fake_child.py ROLE KNOBS.json [the usual arguments]``.

It speaks as much of the wire as the supervisor reads (health, status, reports, metrics) and misbehaves as its knobs
say. Standard library and yaml only, so that it starts quickly.

Knobs per role (all optional):
  die_at_start CODE       exit before listening
  silent                  never listen
  never_ready             listen, but never become ready (trainer and env)
  die_after_ready CODE    exit once the run is running; negative = by that signal
  die_on_go CODE          the same, once ``RUN/go`` exists
  die_at_step N           trainer: raise after that step, as a program with a bug would: traceback, exit code 1
  die_with_api CODE       exit as soon as the rollout API does not answer, as real ones do: the cascade
  eat_memory BYTES        trainer: allocate that much once ``RUN/go`` exists
  ignore_term             SIGTERM does nothing
  term_exit CODE          exit code on SIGTERM (default: trainer 143, others 0)
  grandchild "group"|"session"|"hidden"   start a sleeping process in our group, in a session of its own, or as a daemon
                          without parent and without anything of our environment; its pid is in ``RUN/hidden_pid``
  phase TEXT              trainer: what /health says once it is ready; {prefix} as below
  say TEXT                print before anything else; {prefix} stands for the run's path prefix
  spew_bytes N            print that much without a newline
  spew_mb_per_s N         print that much for ever, with progress bars and without a newline
  die_with_trainer CODE   exit as soon as the trainer does not answer
  silent_before_death     before ``die_on_go`` answer nothing until ``RUN/dies`` exists
  report {...}            ChildReport fields written before exit
  hang_after_report       do not exit after the completion record
  stays_s S               trainer: stay up after the completion record, which says so, until there is an evaluation
  lost_in_evaluation CODE trainer: exit so (negative = by that signal) once it stays up and ``RUN/go`` exists
  evaluates {...}         env: write that as the evaluation once the trainer stays up and ``RUN/go`` exists
  leaves_evaluation CODE  env: exit then instead
  no_report               exit 0 without the completion record
  hold_at N               trainer: wait after step N until ``RUN/go`` exists
  hang_at N               trainer: do nothing after step N for ever
  nan_at N                trainer: that step's loss is not finite; it reports so and ends, as the real one does
  checkpoint_every N      trainer: a complete checkpoint after every Nth step, after the last, and on SIGTERM
  partial_checkpoint N    trainer: begin a checkpoint after step N and never complete it
  step_s S                trainer: time per step
  metrics [{...}, ...]    trainer: further values of each step's line; the last entry holds for all later steps
  queue_size N, current_step N   api: what /health says
  mute_until_go           api: no answer from when the run is running until ``RUN/go`` exists
  nonce TEXT              answer a wrong nonce
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

from hermes_rl_mcp.lifeline import watch


class Child:
    def __init__(self, role: str, knobs: dict[str, Any], arguments: list[str]) -> None:
        self.role = role
        self.knobs = knobs
        config_path = Path(arguments[arguments.index("--config") + 1])
        self.run_dir = config_path.parent
        self.config = yaml.safe_load(config_path.read_text())
        self.listen_fd = int(arguments[arguments.index("--listen-fd") + 1]) if "--listen-fd" in arguments else None
        self.resume = "--resume" in arguments
        self.ready = False
        self.silent = False
        self.environments = 0
        self.step = 0
        self.staying = False

    def health(self) -> dict[str, Any]:
        nonce = self.knobs.get("nonce", self.config["run"]["nonce"])
        if self.role == "api":
            counts = {"groups_received": 0, "groups_rejected": 0}
            counts |= {name: self.knobs.get(name, 0) for name in ("current_step", "queue_size")}
            flags = {"trainer_registered": True, "trainer_started": True}
            return {"status": "ok", "nonce": nonce, "environments": self.environments, **flags, **counts}
        return {
            "status": "ok" if self.ready else "starting",
            "phase": self.said(self.knobs.get("phase", "sampling")) if self.ready else "loading the fake model",
            "nonce": nonce,
            "trainer_initialized": self.ready,
            "model": "fake",
            "policy_version": 0,
            "step": 0,
        }

    def said(self, text: str) -> str:
        return text.replace("{prefix}", str(self.config["run"]["path_prefix"]))

    def answer(self, path: str) -> dict[str, Any] | None:
        prefix = f"/{self.config['run']['path_prefix']}"
        if self.silent or (self.knobs.get("mute_until_go") and self.is_running() and not self.may_go()):
            return None
        if path == f"{prefix}/health":
            return self.health()
        if path == f"{prefix}/register-env" and self.role == "api":
            self.environments += 1
            return {}
        return None

    def serve(self) -> None:
        child = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = child.answer(self.path)
                body = json.dumps(found).encode()
                self.send_response(404 if found is None else 200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments: object) -> None:
                """Quiet: the log belongs to the tests."""

        assert self.listen_fd is not None
        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler, bind_and_activate=False)
        server.socket.close()
        server.socket = socket.socket(fileno=self.listen_fd)
        server.socket.listen(16)
        threading.Thread(target=server.serve_forever, daemon=True).start()

    def report(self, status: str, step: int, **further: Any) -> None:
        text = json.dumps(
            {
                "process": self.role,
                "status": status,
                "step": step,
                "finished_at": datetime.now(UTC).isoformat(),
                **further,
            }
        )
        path = self.run_dir / f"report_{self.role}.json"
        path.with_suffix(".tmp").write_text(text)
        path.with_suffix(".tmp").replace(path)

    def run(self) -> int:
        knobs = self.knobs
        if "say" in knobs:
            sys.stdout.write(self.said(knobs["say"]))
            sys.stdout.flush()
        if "spew_bytes" in knobs:
            sys.stdout.buffer.write(b"\xff" * knobs["spew_bytes"])
            sys.stdout.flush()
        if "grandchild" in knobs:
            self.start_grandchild(knobs["grandchild"])
        if "spew_mb_per_s" in knobs:
            threading.Thread(target=spew, args=(knobs["spew_mb_per_s"],), daemon=True).start()
        if "die_at_start" in knobs:
            return self.die(knobs["die_at_start"])
        if knobs.get("silent"):
            wait_for_ever()
        if self.listen_fd is not None:
            self.serve()
        if knobs.get("never_ready"):
            wait_for_ever()
        if self.role == "env":
            prefix = self.config["run"]["path_prefix"]
            url = f"http://127.0.0.1:{self.config['ports']['rollout_api']}/{prefix}/register-env"
            urllib.request.urlopen(url, timeout=60).close()
        self.ready = True
        for knob, server in (("die_with_api", "rollout_api"), ("die_with_trainer", "trainer")):
            if knob in knobs:
                threading.Thread(target=self.end_with, args=(server, knobs[knob]), daemon=True).start()
        if "die_after_ready" in knobs:
            self.wait_until_running()
            return self.die(knobs["die_after_ready"])
        if "die_on_go" in knobs:
            self.wait_for_go()
            if "silent_before_death" in knobs:
                self.silent = True
                while not (self.run_dir / "dies").exists():
                    time.sleep(0.02)
            return self.die(knobs["die_on_go"])
        if "evaluates" in knobs or "leaves_evaluation" in knobs:
            return self.evaluate()
        return self.train() if self.role == "trainer" else wait_for_ever()

    def die(self, code: int) -> int:
        if "report" in self.knobs:
            self.report(**self.knobs["report"])
        if code < 0:
            os.kill(os.getpid(), -code)
        return code

    def start_grandchild(self, kind: str) -> None:
        program = "import time; time.sleep(300)"
        if kind != "hidden":
            subprocess.Popen([sys.executable, "-c", program], start_new_session=kind == "session")
            return
        pid_file = self.run_dir / "hidden_pid"
        fork = f"import os\nif os.fork(): os._exit(0)\nopen({str(pid_file)!r}, 'w').write(str(os.getpid()))\n{program}"
        subprocess.run([sys.executable, "-c", fork], env={}, start_new_session=True, check=True)

    def end_with(self, server: str, code: int) -> None:
        prefix = self.config["run"]["path_prefix"]
        url = f"http://127.0.0.1:{self.config['ports'][server]}/{prefix}/health"
        with contextlib.suppress(OSError):
            while True:
                urllib.request.urlopen(url, timeout=60).close()
                time.sleep(0.02)
        os._exit(code)

    def wait_until_running(self) -> None:
        """So that a death is one of a running process, not of a starting one."""
        while not self.is_running():
            time.sleep(0.02)

    def is_running(self) -> bool:
        return json.loads((self.run_dir / "run.json").read_text())["status"] not in ("queued", "starting")

    def wait_for_go(self) -> None:
        while not self.may_go():
            time.sleep(0.02)

    def may_go(self) -> bool:
        return (self.run_dir / "go").exists()

    def train(self) -> int:
        total = self.config["env"]["total_steps"]
        self.wait_until_running()
        for step in range(self.first_step(), total + 1):
            if step > self.knobs.get("hold_at", total):
                self.wait_for_go()
            if step > self.knobs.get("hang_at", total):
                wait_for_ever()
            if "eat_memory" in self.knobs:
                self.wait_for_go()
                eaten = bytearray(self.knobs["eat_memory"])
                eaten[:: os.sysconf("SC_PAGESIZE")] = b"x" * len(eaten[:: os.sysconf("SC_PAGESIZE")])
            if step == self.knobs.get("nan_at"):
                self.report("failed", step - 1, error=f"Step {step}: loss or gradient is not finite.", hint="Lower it.")
                return 1
            time.sleep(self.knobs.get("step_s", 0.01))
            line = {"step": step, "time": datetime.now(UTC).isoformat(), "reward/mean": step / total}
            if scripted := self.knobs.get("metrics"):
                line |= scripted[min(step, len(scripted)) - 1]
            with (self.run_dir / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
            self.step = step
            if step == self.knobs.get("partial_checkpoint"):
                self.checkpoint(complete=False)
            elif "checkpoint_every" in self.knobs and (step % self.knobs["checkpoint_every"] == 0 or step == total):
                self.checkpoint()
            if step == self.knobs.get("die_at_step"):
                raise RuntimeError(f"a bug after step {step}")
        if self.knobs.get("no_report"):
            return 0
        stays = {"stays_s": self.knobs["stays_s"]} if "stays_s" in self.knobs else {}
        self.staying = bool(stays)
        self.report("completed", total, detail=self.summary(total), **stays)
        if self.knobs.get("hang_after_report"):
            wait_for_ever()
        if "lost_in_evaluation" in self.knobs:
            self.wait_for_go()
            return self.die(self.knobs["lost_in_evaluation"])
        while stays and not (self.run_dir / "evaluation.json").exists():
            time.sleep(0.02)
        return int(self.knobs.get("exit_code", 0))

    def evaluate(self) -> int:
        while not (self.run_dir / "report_trainer.json").exists():
            time.sleep(0.02)
        self.wait_for_go()
        if "leaves_evaluation" in self.knobs:
            return self.die(self.knobs["leaves_evaluation"])
        path = self.run_dir / "evaluation.json"
        path.with_suffix(".tmp").write_text(json.dumps(self.knobs["evaluates"]))
        path.with_suffix(".tmp").replace(path)
        return wait_for_ever()

    def first_step(self) -> int:
        """Behind the last one on record, if told to resume; else a used directory is refused, as by the real one."""
        lines = (self.run_dir / "metrics.jsonl").read_text().splitlines() if self.resume else []
        if not self.resume and (self.run_dir / "metrics.jsonl").exists():
            raise RuntimeError("the directory already holds a run")
        return 1 + int(json.loads(lines[-1])["step"]) if lines else 1

    def checkpoint(self, *, complete: bool = True) -> None:
        """As far as readers look at it; of the weights there are none."""
        folder = self.run_dir / "checkpoints" / f"step_{self.step}"
        names = ("adapter/adapter_config.json", "adapter/adapter_model.safetensors")
        (folder / "adapter").mkdir(parents=True, exist_ok=True)
        lora = self.config["trainer"]
        adapter = {"r": lora["lora_rank"], "lora_alpha": lora["lora_alpha"]}
        text = json.dumps({**adapter, "base_model_name_or_path": self.config["run"]["base_model"]})
        contents = dict(zip(names, (text.encode(), b"\2\0\0\0\0\0\0\0{}"), strict=True))
        for name, content in contents.items():
            (folder / name).write_bytes(content)
        hashes = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
        if not complete:
            (folder / names[1]).unlink()
            return
        marker = {
            "step": self.step,
            "policy_version": self.step,
            "base_model": self.config["run"]["base_model"],
            "base_sha256": "0" * 64,
            "lora_rank": self.config["trainer"]["lora_rank"],
            "files": hashes,
            "created_at": datetime.now(UTC).isoformat(),
        }
        (folder / "complete.json").write_text(json.dumps(marker))

    def summary(self, total: int) -> dict[str, Any]:
        if "checkpoint_every" not in self.knobs:
            return {}
        return {
            "steps": total,
            "policy_version": total,
            "adapter_path": str(self.run_dir / "checkpoints" / f"step_{total}" / "adapter"),
            "base_model": self.config["run"]["base_model"],
            "model_path": self.config["run"]["model_path"],
            "reward_first5": None,
            "reward_last5": None,
        }

    def terminate(self, *_: object) -> None:
        """SIGTERM."""
        if "checkpoint_every" in self.knobs and self.step:
            self.checkpoint()
        os._exit(0 if self.staying else self.knobs.get("term_exit", 143 if self.role == "trainer" else 0))


def end_with_tests(pid: int) -> None:
    """A run outlives whoever started it, as it should; that of a test run that was killed should not."""
    while True:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            os._exit(71)
        time.sleep(0.5)


def spew(mb_per_s: float) -> None:
    piece = b"\r 42% of all there is \xff" * 45_000  # about 1 MB
    while True:
        sys.stdout.buffer.write(piece)
        sys.stdout.flush()
        time.sleep(1 / mb_per_s)


def wait_for_ever() -> int:
    while True:
        signal.pause()


def main() -> int:
    role, knobs_path = sys.argv[1], Path(sys.argv[2])
    told = json.loads(knobs_path.read_text())
    knobs = told.get(role, {})
    child = Child(role, knobs, sys.argv[3:])
    signal.signal(signal.SIGTERM, signal.SIG_IGN if knobs.get("ignore_term") else child.terminate)
    watch(os.environ, grace_s=knobs.get("lifeline_grace_s", 0.5))
    if "tests_pid" in told:
        threading.Thread(target=end_with_tests, args=(told["tests_pid"],), daemon=True).start()
    return child.run()


if __name__ == "__main__":
    sys.exit(main())
