"""Whether the kernel lets this process wait for pages: a wait point without a fork."""

from __future__ import annotations

import ctypes
import os
import platform
import sys

__all__ = ["userfault_status"]

# System call numbers of userfaultfd by machine (asm/unistd.h).
_NUMBERS = {"x86_64": 323, "aarch64": 282}
_USER_MODE_ONLY = 1


def userfault_status() -> str:
    """Return ``"available"``, or why not, in words.

    Examples
    --------
    >>> isinstance(userfault_status(), str)
    True
    """
    if not sys.platform.startswith("linux"):
        return f"not on {sys.platform}"
    number = _NUMBERS.get(platform.machine())
    if number is None:
        return f"system call number unknown on {platform.machine()}"
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.syscall(
        ctypes.c_long(number), ctypes.c_int(_USER_MODE_ONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    )
    if descriptor < 0:
        return f"refused by the kernel: {os.strerror(ctypes.get_errno())}"
    os.close(descriptor)
    return "available"
