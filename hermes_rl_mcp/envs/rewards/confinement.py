"""The process around a program that nobody has read: it confines itself, runs the program and passes its exit on.

Run as a file by ``execution.run_python`` and imports nothing of ours. Invariant: the program and all it started are
gone when this process is: they live in a process namespace that ends with its first process. Where the kernel allows
none, they are in the process group that the caller kills, and one that leaves the group stays. This process is gone
when its caller is, which holds the other end of the pipe LIFELINE_FD; then it takes its folder with it, too.

    confinement.py LIFELINE_FD MEMORY_BYTES CPU_S FILE_BYTES PROCESSES on|off|required COMMAND...
"""

import contextlib
import ctypes
import os
import resource
import select
import signal
import sys

NEWUSER, NEWPID, NEWNET, NEWIPC = 0x10000000, 0x20000000, 0x40000000, 0x08000000
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
CANNOT_CONFINE = 125
"""Exit status when the network was to be off and could not be turned off."""


def main() -> None:
    lifeline, memory, cpu_s, file_bytes, processes = (int(word) for word in sys.argv[1:6])
    network, command = sys.argv[6], sys.argv[7:]
    os.set_inheritable(lifeline, False)
    libc = ctypes.CDLL(None, use_errno=True)
    apart = enter_namespaces(libc, 0 if network == "on" else NEWNET)
    if network == "required" and not apart:
        sys.stderr.write("this kernel gives no namespaces to this user, so the network cannot be turned off\n")
        sys.exit(CANNOT_CONFINE)
    waking, woken = os.pipe()  # not threads: none can be started after a namespace for processes was
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    child = os.fork()
    if child == 0:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        for limit, value in (
            (resource.RLIMIT_AS, memory),
            (resource.RLIMIT_CPU, cpu_s),
            (resource.RLIMIT_FSIZE, file_bytes),
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_NOFILE, 64),
        ):
            resource.setrlimit(limit, (value, value))
        if apart:
            # Counted per user; only in a namespace of its own does that mean this program alone.
            resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))
        os.execv(command[0], command)
    for descriptor in (0, 1, 2):
        os.close(descriptor)
    events = select.poll()
    for descriptor in (lifeline, waking):
        events.register(descriptor, select.POLLIN)
    while not any(descriptor == lifeline for descriptor, _ in events.poll()):
        os.read(waking, 64)
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    end_without_caller(child)


def end_without_caller(child: int) -> None:
    import shutil  # as good as never

    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    shutil.rmtree(os.getcwd(), ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def enter_namespaces(libc: ctypes.CDLL, network: int) -> bool:
    """Users, processes and, by its flag, network of its own. False where the kernel or its settings refuse."""
    uid, gid = os.getuid(), os.getgid()
    if not hasattr(libc, "unshare") or libc.unshare(NEWUSER | NEWPID | NEWIPC | network):
        return False
    with contextlib.suppress(OSError):
        # Without the mapping the program has nobody's name, which harms nothing.
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(text)
    return True


if __name__ == "__main__":
    main()
