"""A small real file system for tests that fill it: a tmpfs, where mounting one is allowed."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import pytest


class SmallDisk:
    """Large at first, because a run is not started without room; then full at will, with nothing much written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        if self._mount("size=4g", "tmpfs"):
            pytest.skip("mounting a file system needs root")

    def shrink(self, free_bytes: int = 0) -> None:
        """Leaves so many bytes free."""
        stat = os.statvfs(self.folder)
        used = (stat.f_blocks - stat.f_bfree) * stat.f_frsize
        assert self._mount(f"remount,size={used + free_bytes}", "tmpfs") == 0

    def fill(self) -> None:
        """Takes what is left."""
        self.shrink()
        with (self.folder / "filler").open("ab", buffering=0) as file:
            try:
                while file.write(bytes(4096)):
                    pass
            except OSError as error:
                assert error.errno == errno.ENOSPC

    def free(self) -> None:
        """There is room again."""
        assert self._mount("remount,size=4g", "tmpfs") == 0

    def close(self) -> None:
        subprocess.run(["umount", "--lazy", str(self.folder)], check=True)

    def _mount(self, options: str, kind: str) -> int:
        command = ["mount", "-t", kind, "-o", options, kind, str(self.folder)]
        return subprocess.run(command, capture_output=True, check=False).returncode
