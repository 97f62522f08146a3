"""A process that has nothing to do with any run and writes down every signal it gets: ``bystander.py LOG``.

It cannot write down SIGKILL and SIGSTOP; those show as its death and its state. It ends when its stdin does.
"""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    log = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
        signal.signal(number, lambda got, _: os.write(log, f"{got}\n".encode()))
    sys.stdout.write("listening\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main()
