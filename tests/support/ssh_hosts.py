"""Hosts with a real sshd each: network namespaces, temporary keys, and the ssh configuration of a user.

The launcher runs in the hub's namespace. `ssh` in its PATH is the installed one with a configuration file of the test
instead of ``~/.ssh/config``, which has the hosts' names.
"""
from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bpsfast.launch.namespaces import Cluster, netns

_SSHD = "/usr/sbin/sshd"
#: Folder for sshd's privilege separation, which a service manager would create.
_PRIVILEGE_SEPARATION = Path("/run/sshd")


def missing() -> str | None:
    """Return in one line why this machine cannot have such hosts, or None."""
    if not os.access(_SSHD, os.X_OK) or shutil.which("ssh") is None:
        return "no sshd or no ssh here (package openssh-server)"
    return netns.missing()


class SshHosts:
    """The hosts *names*, a context manager. They share this machine's files and processes."""

    def __init__(self, names: Sequence[str], folder: Path, ip_version: int = 4) -> None:
        self.folder = folder
        self.cluster = Cluster(names, ip_version=ip_version)
        self.names = list(names)
        self._sshds: dict[str, subprocess.Popen] = {}
        try:
            _PRIVILEGE_SEPARATION.mkdir(exist_ok=True)
            for key in ("user", "stranger", *names):
                subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True,
                               timeout=20)
            (folder / "authorized").write_text((folder / "user.pub").read_text())
            self.know(names)
            self.configure()
            for name in names:
                self.start_sshd(name)
        except BaseException:
            self.cluster.close()
            raise

    def __enter__(self) -> SshHosts:
        return self

    def __exit__(self, *exc: object) -> None:
        self.cluster.close()

    @property
    def path(self) -> str:
        """Return a PATH whose ssh reads the test's configuration."""
        return f"{self.folder}/bin:{os.environ['PATH']}"

    def know(self, names: Sequence[str], keys_of: Sequence[str] | None = None) -> None:
        """Write the known host keys of *names* (with the keys of *keys_of*), and no others."""
        lines = [f"{self.cluster[name].address} {(self.folder / f'{key}.pub').read_text()}"
                 for name, key in zip(names, keys_of or names)]
        (self.folder / "known_hosts").write_text("".join(lines))

    def configure(self, *more: str) -> None:
        """Write the user's ssh configuration, with *more* lines for all hosts."""
        hosts = "".join(f"Host {name}\n  HostName {self.cluster[name].address}\n" for name in self.names)
        common = [f"UserKnownHostsFile {self.folder}/known_hosts", "GlobalKnownHostsFile /dev/null", "User root",
                  f"IdentityFile {self.folder}/user", "IdentitiesOnly yes", "IdentityAgent none", *more]
        (self.folder / "config").write_text(hosts + "Host *\n" + "".join(f"  {line}\n" for line in common))
        (self.folder / "bin").mkdir(exist_ok=True)
        program = self.folder / "bin" / "ssh"
        program.write_text(f"#!/bin/sh\nexec {shutil.which('ssh')} -F {shlex.quote(f'{self.folder}/config')} \"$@\"\n")
        program.chmod(0o755)

    def start_sshd(self, name: str, *more: str, port: int = 22) -> None:
        """Start sshd on a host, with *more* lines of configuration; ends a running one."""
        self.stop_sshd(name)
        lines = [f"Port {port}", f"HostKey {self.folder}/{name}", f"AuthorizedKeysFile {self.folder}/authorized",
                 "PidFile none", "StrictModes no", "UsePAM no", "PermitRootLogin yes", "PasswordAuthentication no",
                 "KbdInteractiveAuthentication no", *more]
        path = self.folder / f"sshd.{name}"
        path.write_text("".join(f"{line}\n" for line in lines))
        sshd = self.cluster[name].popen([_SSHD, "-D", "-e", "-f", str(path)], stderr=subprocess.PIPE)
        self._sshds[name] = sshd
        assert sshd.stderr is not None
        said = b""
        while b"Server listening on :: port" not in said:
            line = sshd.stderr.readline()
            assert line, f"sshd on {name} ended: {said.decode()}"
            said += line
        # it logs connections later, and must not block
        threading.Thread(target=_discard, args=(sshd.stderr,), daemon=True).start()

    def stop_sshd(self, name: str) -> None:
        """End sshd on a host, and its children: the host is up, but does not answer."""
        sshd = self._sshds.pop(name, None)
        if sshd is not None:
            sshd.kill()
            sshd.wait(10)

    def pids(self, name: str) -> set[int]:
        """Return the processes on a host, except sshd's listener."""
        own = {self._sshds[name].pid} if name in self._sshds else set()
        return {int(pid) for pid in netns.ip("netns", "pids", self.cluster[name].namespace).split()} - own

    def launch(self, *arguments: str, **options: Any) -> subprocess.Popen:
        """Start ``bpsfast`` with *arguments* in the hub."""
        environ = {"PATH": self.path, **options.pop("env", {})}
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return self.cluster.hub.popen([sys.executable, "-m", "bpsfast", *arguments], env=environ, **(pipes | options))

    def run(self, *arguments: str, timeout_s: float = 90.0, **options: Any) -> subprocess.CompletedProcess:
        """Run ``bpsfast`` with *arguments* in the hub and wait for its end."""
        with self.launch(*arguments, **options) as process:
            try:
                out, err = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                out, err = process.communicate(timeout=20)
                raise AssertionError(f"{arguments} has not ended within {timeout_s:g} s:\n{out}\n{err}") from None
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)


def _discard(stream: Any) -> None:
    with stream:
        while stream.read(4096):
            continue
