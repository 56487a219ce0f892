"""A running guest: starts commands in it, hands back their output and exit status, ends with its owner.

    with Machine() as guest:
        print(guest.run(["ibv_devinfo"], timeout_s=30).stdout)

Owner thread only. Every wait has a deadline. The guest ends when `close` is called, when this process dies (the
kernel kills QEMU), and by itself when its control port is closed.
"""
from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import select
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from tests.guest import kernel

BOOT_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 15.0
_PREFIX = "bpsfast-guest."
_SHARE = Path("/run/guest/share")  # the machine's folder, in the guest
_TETHER = Path(__file__).resolve().parents[2] / "bpsfast" / "launch" / "die_with_parent.py"
_INHERITED = ("PATH", "HOME", "LANG", "USER", "TERM", "VIRTUAL_ENV", "PYTHONPATH", "LD_LIBRARY_PATH")

# The last ones only save emulated work: no speculation barriers, no zeroing of fresh pages, no watch on the clock.
_KERNEL_ARGUMENTS = ("console=ttyS0 quiet panic=-1 random.trust_cpu=on "
                     "mitigations=off init_on_alloc=0 tsc=reliable lsm= audit=0")


class GuestDiedError(Exception):
    """The guest ended, or stopped answering, while something was wanted of it; the text ends with its last words."""


class Result(NamedTuple):
    """What became of a command; *status* is None where its time was up and it was killed."""

    status: int | None
    stdout: str
    stderr: str


class Job:
    """A command in the guest. `status` is None while it runs; `folder` holds its output as it is written.

    `out` is the folder that the command sees as ``$OUT``.
    """

    def __init__(self, machine: Machine, number: int, folder: Path) -> None:
        self.status: int | None = None
        self.folder = folder
        self.out = folder / "out"
        self._machine = machine
        self._number = number

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end of the command; say whether it came. All output is there then."""
        deadline = time.monotonic() + timeout_s
        while self.status is None and self._machine._hear(deadline):
            pass
        return self.status is not None

    def kill(self) -> None:
        """End the command and all it started, at once. Idempotent."""
        if self.status is None:
            self._machine._say(f"stop {self._number}")
            if not self.wait(STOP_TIMEOUT_S):
                raise self._machine._died(f"did not end job {self._number} within {STOP_TIMEOUT_S:g} s")

    def read(self, name: str) -> str:
        """Return what it wrote so far to "stdout" or "stderr"."""
        path = self.folder / name
        return path.read_text(errors="replace") if path.exists() else ""


class Machine:
    """A guest with *n_hosts* hosts, each with an RDMA device (package docstring). The first `start` waits for its boot.

    With one processor, programs that poll would each wait for the other's scheduler tick (4 ms): hence two.
    Raises `kernel.MissingError` where this machine cannot have one; `start` raises `GuestDiedError` where it does not
    come up within *boot_timeout_s*.
    """

    def __init__(self, n_hosts: int = 2, n_processors: int = 2, memory_mb: int = 4096,
                 boot_timeout_s: float = BOOT_TIMEOUT_S) -> None:
        image = kernel.prepare()
        self.folder, self._lock = _new_folder()
        self._jobs: dict[int, Job] = {}
        self._key = secrets.token_hex(32)  # for what its hosts measure between them
        self._heard = b""
        shutil.copy(Path(__file__).with_name("agent.sh"), self.folder)
        self._control, theirs = socket.socketpair()
        try:
            with theirs, (self.folder / "qemu.log").open("wb") as log:
                command = self._command(image, theirs.fileno(), n_hosts, n_processors, memory_mb)
                # The kernel watches the thread that forks: the owner's, which lives as long as it wants the guest.
                tether = [sys.executable, str(_TETHER), str(os.getpid()), "9"]
                self._qemu = subprocess.Popen([*tether, *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                              pass_fds=[theirs.fileno()])
        except BaseException:
            self._remove_folder()
            raise
        self._boot_deadline: float | None = time.monotonic() + boot_timeout_s

    def start(self, command: Sequence[str], *, cwd: str | Path = ".", environ: Mapping[str, str] | None = None) -> Job:
        """Start *command* in the folder *cwd*, with a few of this process's variables and those of *environ*."""
        self._wait_for_boot()
        number = len(self._jobs)
        job = Job(self, number, self.folder / str(number))
        job.out.mkdir(parents=True)
        values = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        values["PATH"] = f"/usr/local/bin:{values.get('PATH', os.defpath)}:/usr/sbin:/sbin"
        values |= {"BPSTEST_GUEST": "1", "BPSFAST_JOB_KEY": self._key, "OUT": str(_SHARE / str(number) / "out"),
                   **(environ or {})}
        lines = [f"export {name}={shlex.quote(value)}" for name, value in values.items()]
        # Not `exec`: the shell is process 1 of the job's namespace and reaps what the command leaves behind.
        lines += [f"cd {shlex.quote(os.path.abspath(cwd))} || exit", shlex.join(command), "exit $?"]
        (job.folder / "command").write_text("\n".join(lines))
        self._jobs[number] = job
        self._say(f"run {number}")
        return job

    def run(self, command: Sequence[str], *, timeout_s: float, cwd: str | Path = ".",
            environ: Mapping[str, str] | None = None) -> Result:
        """Run *command* to its end, or kill it after *timeout_s*."""
        job = self.start(command, cwd=cwd, environ=environ)
        ended = job.wait(timeout_s)
        job.kill()
        return Result(job.status if ended else None, job.read("stdout"), job.read("stderr"))

    @property
    def alive(self) -> bool:
        """Say whether the guest still runs."""
        return self._qemu.poll() is None

    def close(self) -> None:
        """End the guest at once and remove its folder. Idempotent."""
        self._control.close()
        self._qemu.kill()
        self._qemu.wait(STOP_TIMEOUT_S)
        self._remove_folder()

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # -- innards ---------------------------------------------------------------------------------------------------

    def _command(self, image: kernel.Image, control_fd: int, n_hosts: int, n_processors: int,
                 memory_mb: int) -> list[str]:
        share = str(self.folder).replace(",", ",,")
        return [
            kernel.qemu(), "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", str(n_processors), "-m", str(memory_mb),
            "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
            "-serial", f"file:{share}/console.log",
            "-kernel", str(image.kernel), "-initrd", str(image.initramfs),
            # what the kernel does not know itself becomes the environment of its first program
            "-append", f"{_KERNEL_ARGUMENTS} N_HOSTS={n_hosts}",
            "-virtfs", "local,path=/,mount_tag=root,security_model=none,readonly=on,multidevs=remap",
            "-virtfs", f"local,path={share},mount_tag=share,security_model=none",
            "-chardev", f"socket,id=control,fd={control_fd}",
            "-device", "virtio-serial-pci", "-device", "virtserialport,chardev=control,name=control",
        ]  # fmt: skip

    def _wait_for_boot(self) -> None:
        if self._boot_deadline is None:
            return
        if (line := self._line(self._boot_deadline)) != b"ready":
            raise self._died(f"said {line!r}" if line else "did not boot in time")
        self._boot_deadline = None

    def _say(self, line: str) -> None:
        try:
            self._control.sendall(line.encode() + b"\n")
        except OSError:
            raise self._died("ended") from None

    def _hear(self, deadline: float) -> bool:
        """Take one "done" from the guest; False if none came until *deadline*."""
        line = self._line(deadline)
        if line is None:
            return False
        verb, number, status = line.split()
        assert verb == b"done", line
        self._jobs[int(number)].status = int(status)
        return True

    def _line(self, deadline: float) -> bytes | None:
        while b"\n" not in self._heard:
            ready, _, _ = select.select([self._control], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return None
            more = self._control.recv(4096)
            if not more:
                raise self._died("ended")
            self._heard += more
        line, _, self._heard = self._heard.partition(b"\n")
        return line

    def _died(self, what: str) -> GuestDiedError:
        """End the guest; return the error that says what it did, with the end of its logs."""
        self._qemu.kill()
        self._qemu.wait(STOP_TIMEOUT_S)
        text = [f"the guest {what}"]
        for name in ("qemu.log", "console.log", "setup.log"):
            path = self.folder / name
            if path.exists() and (said := path.read_text(errors="replace").strip()):
                text.append(f"end of {name}:\n{said[-2000:]}")
        return GuestDiedError("\n".join(text))

    def _remove_folder(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.close(self._lock)
        self._lock = -1


def _new_folder() -> tuple[Path, int]:
    """Make a machine's folder; return it and the descriptor that locks it while its owner lives.

    Folders of owners that were killed are removed: they are those that nobody locks.
    """
    place = Path(tempfile.gettempdir())
    with kernel.locked(kernel.cache_folder() / "lock", BOOT_TIMEOUT_S):
        for old in place.glob(_PREFIX + "*"):
            with contextlib.suppress(OSError):
                if (fd := _lock_folder(old)) is not None:
                    shutil.rmtree(old, ignore_errors=True)
                    os.close(fd)
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
        lock = _lock_folder(folder)
        assert lock is not None, folder
        return folder, lock


def _lock_folder(folder: Path) -> int | None:
    """Lock *folder*; None if it is locked. Raises OSError where it is another user's, or gone."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException as exc:
        os.close(fd)
        if isinstance(exc, BlockingIOError):
            return None
        raise
    return fd
