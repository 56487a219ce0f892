"""End all processes below a launcher when the launcher dies, in whatever way.

The kernel kills the commands that a launcher has started (`die_with_parent`), but not what these have started: below a
shell or another wrapper the ranks would go on. `processes.LocalProcesses` starts one reaper, sends it each session, and
replaces it if it is killed. If both are killed at once, ``bpsfast clean`` finds what is left.

Started by path, and imports the standard library only:

    python orphan_reaper.py LAUNCHER_MARK LAUNCHER_PIDFD < lines "SESSION START_TIME", at last "end" after a job that
    ended well, or "all" after another one, whose processes it then ends as if the launcher had died

* Processes in these sessions are killed at once.
* Processes that have left such a session (``setsid``), but have the launcher's mark and the session in their
  environment, have `_ALONE_S` to end by themselves, as a helper process does that cleans up after its users; then they
  get SIGTERM and SIGKILL.
"""
from __future__ import annotations

import os
import select
import signal
import sys
import time

#: As in `die_with_parent`, which puts it into each process's environment.
_VARIABLE = b"_BPSFAST_LAUNCHER="
_ALONE_S, _AFTER_SIGTERM_S, _GIVE_UP_S = 2.0, 2.0, 30.0
_LOOK_S = 0.02
#: A process that forks while /proc is read may be missed once.
_N_LOOKS = 3


class OrphanReaper:
    """Finds and ends the processes of the launcher with *mark*. `sessions`: start time of each leader, by number."""

    def __init__(self, mark: str) -> None:
        self.sessions: dict[str, str] = {}
        self.last_word = ""
        self._prefix = _VARIABLE + mark.encode() + b"."
        self._rest = b""

    def take(self, data: bytes) -> None:
        """Take *data* from the launcher."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            number, _, start = line.decode().partition(" ")
            if number in ("end", "all"):
                self.last_word = number
            else:
                self.sessions[number] = start

    def end_all(self) -> None:
        """End all processes, for at most `_GIVE_UP_S` (state D, another user's process)."""
        begin_s, n_looks, asked = time.monotonic(), 0, set()
        while n_looks < _N_LOOKS and (passed_s := time.monotonic() - begin_s) < _GIVE_UP_S:
            left = [(pid, where) for name in os.listdir("/proc") if name.isdecimal()
                    if (where := self._where(pid := int(name)))]
            n_looks = 0 if left else n_looks + 1
            for pid, where in left:
                if where == "session" or passed_s >= _ALONE_S + _AFTER_SIGTERM_S:
                    self._signal(pid, signal.SIGKILL)
                elif passed_s >= _ALONE_S and pid not in asked:
                    asked.add(pid)
                    self._signal(pid, signal.SIGTERM)
            time.sleep(_LOOK_S)

    def _signal(self, pid: int, number: int) -> None:
        try:
            fd = os.pidfd_open(pid)
        except OSError:
            return
        try:
            if self._where(pid):  # still the same process, as its pid is now held
                signal.pidfd_send_signal(fd, number)
        except OSError:
            pass  # it has ended, or is another user's
        finally:
            os.close(fd)

    def _where(self, pid: int) -> str:
        """Return "session" if process *pid* is in a session of the launcher, "marked" if it has left it, else ""."""
        fields = _stat(pid)
        if not fields or fields[0] in "ZX" or pid == os.getpid():
            return ""
        session = fields[3]
        if session in self.sessions:
            # a session keeps its number without its leader; with another leader it is a different session
            leader = _stat(int(session))
            if not leader or leader[0] in "ZX" or leader[19] == self.sessions[session]:
                return "session"
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                variables = file.read().split(b"\0")
        except OSError:
            return ""
        began_in = next((each.removeprefix(self._prefix) for each in variables if each.startswith(self._prefix)), b"")
        return "marked" if began_in.decode() in self.sessions else ""


def _stat(pid: int) -> list[str]:
    """As `process_identity.stat`."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def main(arguments: list[str]) -> int:
    """Wait for the end of the launcher, or for its last word."""
    mark, launcher_fd = arguments[0], int(arguments[1])
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    reaper = OrphanReaper(mark)
    poller = select.poll()
    poller.register(0, select.POLLIN)
    poller.register(launcher_fd, select.POLLIN)
    while not reaper.last_word:
        ready = dict(poller.poll())
        if 0 in ready:
            data = os.read(0, 65536)
            reaper.take(data)
            if data:
                continue  # its last word comes before its end
            poller.unregister(0)
        if launcher_fd in ready:
            break
    if reaper.last_word != "end":
        reaper.end_all()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
