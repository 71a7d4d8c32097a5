"""Runs one program with no network and little else; sandbox.py starts it, as a script.

Arguments: a folder to work in, the program, and JSON of the limits. The program has namespaces of
its own: of users, network, mounts, processes and shared memory. All files are read-only for it, but
for a small file system in memory over its folder. The process with number 1 is ours: when it ends
or is killed, the kernel ends all that the program has started. Python's own modules are enough.
"""

import ctypes
import json
import os
import resource
import struct
import sys
from collections.abc import Mapping

FAILED = 125  # the exit code if there is no sandbox; stderr says why
FIRST_UID = 2_000_000_000  # of users that nobody has
CLONE_NEWUSER, CLONE_NEWNET, CLONE_NEWNS = 0x10000000, 0x40000000, 0x00020000
CLONE_NEWPID, CLONE_NEWIPC = 0x20000000, 0x08000000
MS_NODEV_NOSUID, MS_REC_PRIVATE = 4 | 2, 1 << 14 | 1 << 18
SYS_MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1
PR_SET_KEEPCAPS, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE = 8, 38, 47, 2
CAP_DAC_READ_SEARCH, CAPABILITIES_V3 = 2, 0x20080522
LIBC = ctypes.CDLL(None, use_errno=True)


def check(what: str, result: int) -> None:
    """OSError with the name of a C function that failed."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def enter(work: str, user: int, limits: Mapping[str, int]) -> None:
    """Leave the machine's namespaces for new ones, of which the next child is the first process."""
    uid, gid, owner = os.geteuid(), os.getegid(), ""
    spaces = CLONE_NEWNET | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC
    if uid == 0:
        owner = f",uid={user}"
        check("unshare", LIBC.unshare(spaces))
    else:
        check("unshare", LIBC.unshare(spaces | CLONE_NEWUSER))
        maps = {"setgroups": "deny", "uid_map": f"{uid} {uid} 1", "gid_map": f"{gid} {gid} 1"}
        for name, text in maps.items():
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    check("mount /", LIBC.mount(None, b"/", None, MS_REC_PRIVATE, None))
    read_only = struct.pack("4Q", MOUNT_ATTR_RDONLY, 0, 0, 0)
    call = (SYS_MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, read_only, len(read_only))
    check("mount_setattr /", LIBC.syscall(*call))
    options = f"size={limits['disk_bytes']},nr_inodes=4096,mode=700{owner}".encode()
    mounted = LIBC.mount(b"tmpfs", work.encode(), b"tmpfs", MS_NODEV_NOSUID, options)
    check(f"mount {work}", mounted)


def leave_root(uid: int) -> None:
    """Become a user of one's own, who may read what root may: Python itself may lie in /root.

    Limits of processes are those of a user, and do not hold for root.
    """
    check("prctl", LIBC.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0))
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    kept = 1 << CAP_DAC_READ_SEARCH
    header = struct.pack("Ii", CAPABILITIES_V3, 0)
    check("capset", LIBC.capset(header, struct.pack("6I", kept, kept, kept, 0, 0, 0)))
    raised = LIBC.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_DAC_READ_SEARCH, 0, 0)
    check("prctl", raised)


def run(work: str, program: str, user: int, limits: Mapping[str, int]) -> None:
    """Become the program; capabilities to change anything end with this."""
    for kind, number in (
        (resource.RLIMIT_CPU, limits["cpu_s"]),
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["output_bytes"]),
        (resource.RLIMIT_NPROC, limits["num_processes"]),
        (resource.RLIMIT_NOFILE, 256),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (number, number))
    if os.geteuid() == 0:
        leave_root(user)
    check("prctl", LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    os.chdir(work)
    words = {"PATH": "/usr/bin:/bin", "HOME": work, "TMPDIR": work, "LANG": "C.UTF-8"}
    words |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    told = os.dup(2)  # not the program's: it ends with exec
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        os.execve(sys.executable, [sys.executable, "-I", program], words)
    except OSError:
        os.dup2(told, 2)
        raise


def main() -> int:
    """The program's exit code, or 128 and the signal that ended it; FAILED without a sandbox."""
    work, program, limits = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    user = FIRST_UID + os.getpid()
    try:
        enter(work, user, limits)
        first = os.fork()
        if first == 0:
            child = os.fork()
            if child == 0:
                run(work, program, user, limits)
            while (ended := os.wait())[0] != child:  # orphans come to us
                pass
            os._exit(os.waitstatus_to_exitcode(ended[1]) % 256)
        return os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) % 256
    except OSError as error:
        print(error.strerror, file=sys.stderr, flush=True)
        os._exit(FAILED)


if __name__ == "__main__":
    sys.exit(main())
