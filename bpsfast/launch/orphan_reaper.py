"""The guardian of a launcher: when that dies, however it dies, it ends all that runs below it, and then itself.

The kernel kills the commands that a launcher has started (`tether`), but not what these have started: below a shell
or another wrapper the ranks would go on. `child.LocalProcesses` starts one guardian, tells it of each session, and starts
another one if it is killed. If both are killed at once, ``bpsfast clean`` finds what is left.

Started by path, and imports the standard library only, as `tether` does:

    python orphan_reaper.py LAUNCHER_MARK LAUNCHER_PIDFD < lines "SESSION START_TIME", at last "end" after a job that ended
    well, or "all" after another one, whose processes it then ends as if the launcher had died

* Sessions that the launcher has told of are killed at once.
* What has left such a session (``setsid``), but has the launcher's mark and the session in its environment, has
  `_ALONE_S` to end by itself, as a helper process does that cleans up once its users are gone; then come SIGTERM and
  SIGKILL.
"""
from __future__ import annotations

import os
import select
import signal
import sys
import time

#: As in `tether`, which puts it into each process's environment.
_VARIABLE = b"_BPSFAST_LAUNCHER="
_ALONE_S, _AFTER_SIGTERM_S, _GIVE_UP_S = 2.0, 2.0, 30.0
_LOOK_S = 0.02
#: A process that forks while /proc is read may be missed once.
_N_LOOKS = 3


class OrphanReaper:
    """Guards what belongs to the launcher of *mark*. `sessions`: start time of each one's leader, by number."""

    def __init__(self, mark: str) -> None:
        self.sessions: dict[str, str] = {}
        self.last_word = ""
        self._prefix = _VARIABLE + mark.encode() + b"."
        self._rest = b""

    def take(self, data: bytes) -> None:
        """Take what the launcher has written."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            number, _, start = line.decode().partition(" ")
            if number in ("end", "all"):
                self.last_word = number
            else:
                self.sessions[number] = start

    def end_all(self) -> None:
        """End what is left, until nothing is or `_GIVE_UP_S` have passed (state D, another user's process)."""
        begin_s, n_looks, asked = time.monotonic(), 0, set()
        while n_looks < _N_LOOKS and (passed_s := time.monotonic() - begin_s) < _GIVE_UP_S:
            left = [(pid, place) for name in os.listdir("/proc") if name.isdecimal()
                    if (place := self._place_of(pid := int(name)))]
            n_looks = 0 if left else n_looks + 1
            for pid, place in left:
                if place == "session" or passed_s >= _ALONE_S + _AFTER_SIGTERM_S:
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
            if self._place_of(pid):  # still the same process, now that its number is held
                signal.pidfd_send_signal(fd, number)
        except OSError:
            pass  # it has ended, or is another user's
        finally:
            os.close(fd)

    def _place_of(self, pid: int) -> str:
        """Return "session" if process *pid* is in one of the launcher's, "marked" if it has left it, else ""."""
        fields = _stat(pid)
        if not fields or fields[0] in "ZX" or pid == os.getpid():
            return ""
        session = fields[3]
        if session in self.sessions:
            # without its leader a session keeps its number; with another leader it is somebody else's
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
    """As `owner.stat`."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def main(arguments: list[str]) -> int:
    """Wait for the end of the launcher, or for its word that all is done."""
    mark, launcher_fd = arguments[0], int(arguments[1])
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    guardian = OrphanReaper(mark)
    poller = select.poll()
    poller.register(0, select.POLLIN)
    poller.register(launcher_fd, select.POLLIN)
    while not guardian.last_word:
        ready = dict(poller.poll())
        if 0 in ready:
            data = os.read(0, 65536)
            guardian.take(data)
            if data:
                continue  # its last words come before its end
            poller.unregister(0)
        if launcher_fd in ready:
            break
    if guardian.last_word != "end":
        guardian.end_all()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
