"""Build ssh's command line, and explain its failures.

ssh's own configuration applies (``~/.ssh/config``: names, users, keys, jump hosts). Host keys are checked and ssh never
prompts: whatever it would ask a person is an error with an explanation, before anything runs on any host.
"""
from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence

import msgspec

from .._version import __version__
from ..orchestration.errors import BpsError, ConfigError, LackingError, MismatchError, PeerLostError, StallError
from .daemons import describe_exit
from .host_list import Host

#: Seconds that ssh may take to connect, unless an option of the user says otherwise.
CONNECT_TIMEOUT_S = 10
#: ssh sends a keepalive every `_ALIVE_S` seconds, and ends the connection after `_N_ALIVE` without an answer.
_ALIVE_S, _N_ALIVE = 5, 4
SILENT_HOST_S = _ALIVE_S * _N_ALIVE
#: Exit code of ssh if ssh itself failed; otherwise it is the remote command's.
_OF_SSH = 255
#: No terminal, no password prompt, no connection shared with other programs (it would outlive them, or they this).
_FIRST = ("BatchMode=yes", "ControlMaster=no", "ControlPath=none", "RemoteCommand=none", "RequestTTY=no",
          "ClearAllForwardings=yes")
#: The user's options and configuration take precedence over these: ssh uses an option's first value.
_LAST = (f"ConnectTimeout={CONNECT_TIMEOUT_S}", f"ServerAliveInterval={_ALIVE_S}", f"ServerAliveCountMax={_N_ALIVE}")
#: Matches options without their quotes, which ssh allows around the name, the value and parts of it.
_UNCHECKED = re.compile(r"[\s=]*stricthostkeychecking[\s=]*(no|off|false|accept-new)", re.I)


class Ssh(msgspec.Struct, frozen=True, kw_only=True):
    """Options for ssh and for the hosts.

    `python`: the interpreter with bpsfast there; `directory`: the processes' working directory; `python_path`:
    PYTHONPATH there.
    """

    port: int | None = None
    identity_file: str | None = None
    options: tuple[str, ...] = ()
    python: str = sys.executable
    directory: str = ""
    python_path: str = ""

    def check(self) -> None:
        """Raise `ConfigError` if ssh is not installed, or an option disables the check of host keys."""
        if shutil.which("ssh") is None:
            raise LackingError("hosts are reached by the command ssh, which is not installed here (package "
                               "openssh-client)")
        for option in self.options:
            if _UNCHECKED.match(re.sub(r"[\"']", "", option)):
                raise ConfigError(f"--ssh-option {option}: the job's key and program go to these hosts, so their host "
                                  "keys are checked. Make them known once, `ssh HOST` by hand")

    def argv(self, host: Host) -> list[str]:
        """Return the command whose standard input and output are those of the agent on *host*."""
        # run by any shell there; PYTHONSAFEPATH, as the home folder must not be imported from
        variables = ["PYTHONSAFEPATH=1", *([f"PYTHONPATH={self.python_path}"] if self.python_path else [])]
        agent = ["env", *variables, self.python, "-m", "bpsfast", "agent"]
        if host.is_here:
            return agent
        return ["ssh", *self._options(), host.name, f"exec {shlex.join(agent)}"]

    def by_hand(self, host: Host) -> str:
        """Return a command for the user to find out why there is no agent on *host*."""
        return shlex.join(self.argv(host) if host.is_here else ["ssh", *self._address(), host.name, "true"])

    def _options(self) -> list[str]:
        options = [*_FIRST, *self.options, *_LAST]
        return ["-T", *self._address(), *(word for option in options for word in ("-o", option))]

    def _address(self) -> list[str]:
        found = [] if self.port is None else ["-p", str(self.port)]
        return found if self.identity_file is None else [*found, "-i", self.identity_file]

    def explain(self, host: Host, code: int, output: Sequence[str]) -> BpsError:
        """Return the error that there is no agent on *host*: ssh or the agent ended with *code* after *output*."""
        text = "\n".join(output)
        shown = _last(output)
        where, by_hand = host.name, self.by_hand(host)
        if code == _OF_SSH and (error := self._explain_ssh(host, output, by_hand)) is not None:
            return error
        if "No module named bpsfast" in text or "No module named 'bpsfast'" in text:
            return ConfigError(f"{where}: bpsfast is not installed for {self.python} there: install bpsfast "
                               f"{__version__}, or name another interpreter by --remote-python")
        if "No such command 'agent'" in text:
            return MismatchError(f"{where}: {self.python} there has a bpsfast that is older than {__version__}, the "
                                 "one here: install the same on all hosts")
        if code in (126, 127):
            return ConfigError(f"{where}: {self.python} cannot be run there ({shown}): name its Python by "
                               "--remote-python")
        return PeerLostError(f"{where}: no agent of bpsfast came up (exit code {code}): {shown}. Try {by_hand}")

    def lost(self, host: Host, code: int, output: Sequence[str]) -> BpsError:
        """Return the error that the agent on *host* has ended."""
        is_of_agent = host.is_here or 0 <= code != _OF_SSH
        return PeerLostError(f"{host.name}: {'its agent' if is_of_agent else 'ssh'} {describe_exit(code)}: "
                             f"{_last(output)}")

    def _explain_ssh(self, host: Host, output: Sequence[str], by_hand: str) -> BpsError | None:
        """Return the error that ssh itself printed, None if it is not a known one."""
        where, text = host.name, "\n".join(output)
        if "REMOTE HOST IDENTIFICATION HAS CHANGED" in text:
            name = where.rpartition("@")[2]
            known_as = name if self.port is None else shlex.quote(f"[{name}]:{self.port}")
            return ConfigError(f"{where}: its host key has changed, so another machine may pretend to be it. "
                               f"Find out why it changed; then: ssh-keygen -R {known_as}, and {by_hand}")
        if "Host key verification failed" in text or "host key is known for" in text:
            return ConfigError(f"{where}: its host key is not known here, so its identity cannot be checked. Type "
                               f"`{by_hand}` once and compare the fingerprint it shows")
        if "Permission denied" in text:
            return ConfigError(f"{where}: login refused ({_line(output, 'Permission denied')}). `{by_hand}` must work "
                               f"without a password: ssh-copy-id {where}, or --identity-file")
        if "Could not resolve hostname" in text:
            return ConfigError(f"{where}: {_line(output, 'Could not resolve hostname')}: neither DNS nor ~/.ssh/config "
                               "knows that name")
        for words in ("Connection refused", "No route to host", "Network is unreachable", "Connection timed out",
                      "Operation timed out", "timed out during banner exchange"):
            if words in text:
                return PeerLostError(f"{where}: not reached by ssh ({_line(output, words)}): does it run, with sshd on "
                                     f"that port? Try {by_hand}")
        return None

    def late(self, host: Host, timeout_s: float, noise: bytes) -> BpsError:
        """Return the error that no agent on *host* has sent anything within *timeout_s*."""
        heard = f"; it printed {noise[-200:]!r} instead" if noise else ""
        return StallError(f"{host.name}: no agent of bpsfast answered within {timeout_s:g} s{heard}. Does a login "
                          f"script wait for input there? Try {self.by_hand(host)}")


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return *environ* without variables of a job, so that no SendEnv of ssh passes its key on."""
    return {name: value for name, value in environ.items() if not name.startswith("BPSFAST_")}


def _last(output: Sequence[str]) -> str:
    return next((line for line in reversed(output) if line.strip()), "no output")


def _line(output: Sequence[str], words: str) -> str:
    return next(line for line in output if words in line).strip()
