"""What must not leave this machine: secrets, who works here, how it and its neighbours are called."""
from __future__ import annotations

import os
import pwd
import re
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from ..orchestration.errors import ConfigError

_NAMES = re.compile(r"KEY|TOKEN|SECRET|PASS|PWD|PSWD|CREDENTIAL|CRED\b|AUTH|COOKIE|SIGNATURE|PRIVATE|LICEN[CS]E|DSN|"
                    r"WEBHOOK|SALT|SEED_PHRASE", re.I)
#: Variables of such names that are folders, which everybody's shell sets.
_FOLDERS = frozenset({"PWD", "OLDPWD"})
#: Values that say how, not what: hiding them would make a report unreadable and protect nothing.
_WORDS = frozenset({"true", "false", "none", "null", "auto", "never", "always", "prefer", "force", "default", "enabled",
                    "disabled", "optional", "required"})
#: A shorter one would be found everywhere.
_LEAST_SECRET = 4
#: Accounts that are nobody: replacing these words would garble paths and texts.
_NOBODY = frozenset({"root", "user", "nobody", "daemon", "admin", "ubuntu", "debian", "runner"})
_HOST_VARIABLES = ("HOSTNAME", "HOST", "MASTER_ADDR", "DMLC_PS_ROOT_URI", "DMLC_NODE_HOST", "SLURMD_NODENAME",
                   "SLURM_LAUNCH_NODE_IPADDR", "SLURM_SUBMIT_HOST", "BPSFAST_NODE_HOST", "BPSFAST_SCHEDULER",
                   "BPSFAST_MUSTER", "PMIX_HOSTNAME", "KUBERNETES_NODE_NAME", "SSH_CONNECTION")
_LISTS = ("SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURM_STEP_NODELIST", "LSB_HOSTS", "LSB_MCPU_HOSTS")
_USER_VARIABLES = ("USER", "LOGNAME", "SUDO_USER", "USERNAME", "SLURM_JOB_USER", "NB_USER")
_HOST = re.compile(r"[A-Za-z][\w-]*(?:\.[\w-]+)*")
_RANGE = re.compile(r"([A-Za-z][\w-]*?)\[([\d,-]+)\]")
_MOST_IN_RANGE = 4096


class RedactionRules(msgspec.Struct, frozen=True):
    """What to look for, in full: secrets, users, home folders, host names, network domains."""

    secrets: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    homes: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    domains: tuple[str, ...] = ()


def is_secret_name(name: str) -> bool:
    """Whether a variable of this name holds something that nobody else shall know."""
    return name not in _FOLDERS and _NAMES.search(name) is not None


def secrets_of(environ: Mapping[str, str]) -> set[str]:
    """Return the secrets in an environment: values of variables whose name says so."""
    return {value for name, value in environ.items() if is_secret_name(name) and _is_secret(value)}


def found(environ: Mapping[str, str], job_key: str = "", words: Iterable[str] = ()) -> RedactionRules:
    """Return what to hide on this machine. *job_key*: the job's; *words*: host names that the user adds."""
    users = {environ[name] for name in _USER_VARIABLES if environ.get(name)}
    homes = {environ.get("HOME", ""), os.path.expanduser("~")}
    try:
        account = pwd.getpwuid(os.getuid())
    except KeyError:  # a container without this user in its passwd
        pass
    else:
        users.add(account.pw_name)
        homes.add(account.pw_dir)
    hosts = {socket.gethostname(), *words, *_etc_hosts()}
    for name in _HOST_VARIABLES:
        hosts |= set(_HOST.findall(environ.get(name, "")))
    for name in _LISTS:
        hosts |= _listed(environ.get(name, ""))
    secrets = secrets_of(environ) | ({job_key} if _is_secret(job_key) else set())
    return RedactionRules(
        secrets=tuple(sorted(secrets, key=lambda secret: (-len(secret), secret))),
        users=tuple(sorted(user for user in users if user not in _NOBODY and len(user) > 1)),
        homes=tuple(sorted((home.rstrip("/") for home in homes if home.rstrip("/").count("/") > 0 and home != "~"),
                           key=lambda home: (-len(home), home))),
        hosts=tuple(sorted(host for host in hosts if len(host) > 1 and not host.startswith("localhost"))),
        domains=_domains())


def job_key_of(environ: Mapping[str, str]) -> str:
    """Return the job's key as this environment gives it, "" if it does not or its file cannot be read."""
    from ..base import settings
    from ..base.job_key import given_key

    try:
        return given_key(settings.load_with_origins(None, environ)[0])
    except ConfigError:  # wrong settings are what the report is about; the variable itself is a secret by its name
        return ""


def _is_secret(value: str) -> bool:
    return len(value.strip()) >= _LEAST_SECRET and value.strip().lower() not in _WORDS


def _etc_hosts() -> set[str]:
    try:
        lines = Path("/etc/hosts").read_text(errors="replace").splitlines()
    except OSError:
        return set()
    return {name for line in lines for name in line.partition("#")[0].split()[1:]
            if not name.startswith(("localhost", "ip6-"))}


def _listed(text: str) -> set[str]:
    """Return the hosts of Slurm's "gpu[01-03,7],cpu1", or of a list with blanks."""
    hosts = set()
    for prefix, ranges in _RANGE.findall(text):
        for part in ranges.split(","):
            first, _, last = part.partition("-")
            end = int(last or first) if first else -1
            if first and end - int(first) < _MOST_IN_RANGE:
                hosts |= {f"{prefix}{number:0{len(first)}}" for number in range(int(first), end + 1)}
    return hosts | set(_HOST.findall(_RANGE.sub("", text)))


def _domains() -> tuple[str, ...]:
    try:
        lines = Path("/etc/resolv.conf").read_text(errors="replace").splitlines()
    except OSError:
        return ()
    words = {word for line in lines if line.startswith(("search", "domain")) for word in line.split()[1:]}
    return tuple(sorted(word.strip(".") for word in words if "." in word.strip(".")))
