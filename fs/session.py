"""The FUSE session: mounting, serving, letting go. Used by the composition root, in this order."""

import os
import pathlib

import pyfuse3

from deltapool.fs import init, loop
from deltapool.fs.fuse import Adapter

FUSE_CONF = pathlib.Path("/etc/fuse.conf")


def allow_other() -> bool:
    """Whether this user may let other users into the mount."""
    if os.geteuid() == 0:
        return True
    try:
        lines = FUSE_CONF.read_text().splitlines()
    except OSError:
        return False
    return any(line.strip() == "user_allow_other" for line in lines)


def attach(adapter: Adapter, mountpoint: pathlib.Path, source: str, *, poll: bool, renegotiate: bool) -> None:
    """Mounts. `source` is what /proc/mounts shows (see `state`). `poll` and `renegotiate`: see `loop` and `init`.

    Raises RuntimeError if the kernel or fusermount3 refuses."""
    options = {f"fsname={source}", "subtype=deltapool", "default_permissions"}
    if allow_other():
        options.add("allow_other")
    pyfuse3.init(adapter, str(mountpoint), options)
    device = loop.device_descriptor()
    loop.install(poll=poll)
    if renegotiate and device is not None:
        init.install(device)


async def serve() -> None:
    """Answers the kernel until the filesystem is unmounted. With a detached mount the kernel may end the connection
    by aborting it when the last user lets go: that is an end like any other."""
    try:
        await pyfuse3.main()
    except* ConnectionAbortedError:
        pass


def stop() -> None:
    """Ends `serve` although the filesystem is still in use: those who use it get ENOTCONN."""
    pyfuse3.terminate()


def detach() -> None:
    """After `serve`: releases the device, and unmounts if that has not happened."""
    loop.uninstall()
    pyfuse3.close(unmount=True)
