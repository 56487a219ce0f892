"""Redacts secrets, people, hosts and addresses in bug reports: each gets the same placeholder everywhere.

A redacted report still shows that two lines concern one machine. Addresses of one /24 (IPv6: /64) get placeholders of
one network.
"""
from __future__ import annotations

import base64
import ipaddress
import json
import os
import pwd
import re
import socket
import urllib.parse
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from ..orchestration.errors import ConfigError

_NAMES = re.compile(r"KEY|TOKEN|SECRET|PASS|PWD|PSWD|CREDENTIAL|CRED\b|AUTH|COOKIE|SIGNATURE|PRIVATE|LICEN[CS]E|DSN|"
                    r"WEBHOOK|SALT|SEED_PHRASE", re.I)
#: Variables with such names that hold folders and are set in every shell.
_FOLDERS = frozenset({"PWD", "OLDPWD"})
#: Values that are options, not secrets: hiding them would garble the report.
_WORDS = frozenset({"true", "false", "none", "null", "auto", "never", "always", "prefer", "force", "default", "enabled",
                    "disabled", "optional", "required"})
#: Shorter secrets would match everywhere.
_LEAST_SECRET = 4
#: Common accounts; hiding them would garble paths and texts.
_NOBODY = frozenset({"root", "user", "nobody", "daemon", "admin", "ubuntu", "debian", "runner"})
_HOST_VARIABLES = ("HOSTNAME", "HOST", "MASTER_ADDR", "DMLC_PS_ROOT_URI", "DMLC_NODE_HOST", "SLURMD_NODENAME",
                   "SLURM_LAUNCH_NODE_IPADDR", "SLURM_SUBMIT_HOST", "BPSFAST_NODE_HOST",
                   "BPSFAST_ADVERTISE", "BPSFAST_SCHEDULER",
                   "BPSFAST_COORDINATOR", "PMIX_HOSTNAME", "KUBERNETES_NODE_NAME", "SSH_CONNECTION")
_LISTS = ("SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURM_STEP_NODELIST", "LSB_HOSTS", "LSB_MCPU_HOSTS")
_USER_VARIABLES = ("USER", "LOGNAME", "SUDO_USER", "USERNAME", "SLURM_JOB_USER", "NB_USER")
_HOST = re.compile(r"[A-Za-z][\w-]*(?:\.[\w-]+)*")
_RANGE = re.compile(r"([A-Za-z][\w-]*?)\[([\d,-]+)\]")
_MOST_IN_RANGE = 4096


class RedactionRules(msgspec.Struct, frozen=True):
    """The words to hide: secrets, users, home folders, host names, network domains."""

    secrets: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    homes: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    domains: tuple[str, ...] = ()


def is_secret_name(name: str) -> bool:
    """Tell whether a variable of this name holds a secret."""
    return name not in _FOLDERS and _NAMES.search(name) is not None


def found(environ: Mapping[str, str], job_key: str = "", words: Iterable[str] = ()) -> RedactionRules:
    """Return what to hide on this machine. *job_key* is that of the job; *words* are host names from the user."""
    users = {environ[name] for name in _USER_VARIABLES if environ.get(name)}
    homes = {environ.get("HOME", ""), os.path.expanduser("~")}
    try:
        account = pwd.getpwuid(os.getuid())
    except KeyError:  # in a container the passwd may lack this user
        pass
    else:
        users.add(account.pw_name)
        homes.add(account.pw_dir)
    known = {name for line in _lines("/etc/hosts") for name in line.partition("#")[0].split()[1:]}
    hosts = {socket.gethostname(), *words, *(name for name in known if not name.startswith("ip6-"))}
    for name in _HOST_VARIABLES:
        hosts |= set(_HOST.findall(environ.get(name, "")))
    for name in _LISTS:
        hosts |= _listed(environ.get(name, ""))
    secrets = {job_key, *(value for name, value in environ.items() if is_secret_name(name))}
    return RedactionRules(
        secrets=_longest_first(filter(_is_secret, secrets)),
        users=tuple(sorted(user for user in users if user not in _NOBODY and len(user) > 1)),
        homes=_longest_first(home.rstrip("/") for home in homes if home.rstrip("/").count("/") > 0 and home != "~"),
        hosts=tuple(sorted(host for host in hosts if len(host) > 1 and not host.startswith("localhost"))),
        domains=tuple(sorted({word.strip(".") for line in _lines("/etc/resolv.conf")
                              if line.startswith(("search", "domain"))
                              for word in line.split()[1:] if "." in word.strip(".")})))


def job_key_of(environ: Mapping[str, str]) -> str:
    """Return the job key of this environment, "" if there is none or its file cannot be read."""
    from ..base import settings
    from ..base.job_key import given_key

    try:
        return given_key(settings.load_with_origins(None, environ)[0])
    except ConfigError:  # the report may be about wrong settings; the variable itself counts as a secret by its name
        return ""


def _is_secret(value: str) -> bool:
    return len(value.strip()) >= _LEAST_SECRET and value.strip().lower() not in _WORDS


def _longest_first(words: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(words, key=lambda word: (-len(word), word)))


def _lines(path: str) -> list[str]:
    """Return the lines of a file, none if it cannot be read."""
    try:
        return Path(path).read_text(errors="replace").splitlines()
    except OSError:
        return []


def _listed(text: str) -> set[str]:
    """Return the hosts of Slurm's "gpu[01-03,7],cpu1", or of a list separated by blanks."""
    hosts = set()
    for prefix, ranges in _RANGE.findall(text):
        for part in ranges.split(","):
            first, _, last = part.partition("-")
            end = int(last or first) if first else -1
            if first and end - int(first) < _MOST_IN_RANGE:
                hosts |= {f"{prefix}{number:0{len(first)}}" for number in range(int(first), end + 1)}
    return hosts | set(_HOST.findall(_RANGE.sub("", text)))


_HIDDEN = "(hidden)"
#: Patterns of well-known tokens.
_TOKENS = re.compile(
    r"hf_[A-Za-z0-9]{16,}|gh[opsur]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|sk-[\w-]{16,}|"
    r"(?:AKIA|ASIA)[A-Z0-9]{16}|xox[abpr]-[\w-]{10,}|(?<![\w-])eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*|"
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)|\b[0-9a-fA-F]{32,}\b", re.S)
_BEARER = re.compile(r"(?i)\b(bearer|basic)(\s+)[\w.~+/=-]{8,}")
_URL = re.compile(r"(?<=://)[^/\s@:]+(?::[^/\s@]*)?(?=@)")
# A pattern starts at the start of a word; otherwise each character of a long word is tried, which is quadratic.
#: NAME=value, NAME: value, "NAME": "value", --name value
_ASSIGNED = re.compile(r"""(?<![\w.-])(?P<name>[A-Za-z_][\w.-]*)(?P<between>["']?\s*[=:]\s*)"""
                       r"""(?P<value>"[^"\n]*"|'[^'\n]*'|[^\s,;"'}\])]+)""")
_OPTION = re.compile(r"""(?<![\w-])(?P<name>--?[A-Za-z][\w-]*)(?P<between>\s+)"""
                     r"""(?P<value>"[^"\n]*"|'[^'\n]*'|[^\s-]\S*)""")
_EMAIL = re.compile(r"(?<![\w.+-])[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
_ANY_HOME = re.compile(r"(?P<start>/(?:home|Users)/)(?P<user>[^/\s\"':,;)]+)")
#: Names that our programs print after a node or pid.
_NAMED = re.compile(r"(?:\b(?:node|helper) \d+ \(|\(pid \d+ on )(?P<host>[A-Za-z][\w-]*(?:\.[\w-]+)*)\)")
_DOMAIN = re.compile(r"(?<![\w.-])[\w-]+(?:\.[\w-]+)*\.(?:local|internal|intern|lan|corp|cluster|svc)\b")
_IPV4 = re.compile(r"(?<![\w.-])(?:\d{1,3}\.){3}\d{1,3}(?![\w.]*\d)")
_IPV6 = re.compile(r"(?<![\w:.])(?=[0-9A-Fa-f]*:)[0-9A-Fa-f:.]{2,45}(?<!\.)(?![\w:])")
_MAC = re.compile(r"(?<![\w:])(?:[0-9a-fA-F]{2}:){5}[0-9a-fA-F]{2}(?![\w:])")
_GUID = re.compile(r"(?<![\w:])(?:[0-9a-fA-F]{4}:){3}[0-9a-fA-F]{4}(?![\w:])")
_MOST_ROUNDS = 4


class Leak(Exception):
    """A secret is left in the text, which must not be shown."""


class Redactor:
    """Replaces what *hidden* names and tokens, addresses and home folders; `counts` them by kind. One thread."""

    def __init__(self, hidden: RedactionRules) -> None:
        self._secrets = _longest_first({form for secret in hidden.secrets for form in _forms(secret)})
        self._homes = [re.compile(re.escape(home) + r"(?![\w.-])") for home in hidden.homes]
        self._users: dict[str, str] = {}
        self._hosts: dict[str, str] = {}
        self._networks: dict[Any, tuple[int, dict[Any, int]]] = {}
        self._cards: dict[str, str] = {}
        self._guids: dict[str, str] = {}
        self._domains = [re.compile(rf"(?<![\w-])(?:[\w-]+\.)*{re.escape(domain)}(?![\w-])")
                         for domain in hidden.domains]
        for user in hidden.users:
            self._user(user)
        for host in hidden.hosts:
            self._host(host)
        self.counts: Counter[str] = Counter()

    def text(self, text: str, addresses: bool = True) -> str:
        """Return *text* with placeholders (no *addresses*: 1.2.3.4 is a version); raise `Leak` if a secret is left."""
        done = self._redact(self._without_secrets(text), addresses)
        for _ in range(_MOST_ROUNDS):
            if not any(secret in done for secret in self._secrets):
                break
            done = self._without_secrets(done)
        self.check(done)
        return done

    def check(self, text: str) -> None:
        """Raise `Leak` if a secret is in *text*."""
        if any(secret in text for secret in self._secrets):
            raise Leak("a secret of the environment could not be removed")

    def data(self, data: Any, addresses: bool = True) -> Any:
        """Return dicts and lists with placeholders in every text, so that JSON stays valid."""
        if isinstance(data, dict):
            return {self.text(key, addresses): (_HIDDEN if value and is_secret_name(key) and isinstance(value, str)
                                                and value != "(set)" else self.data(value, addresses))
                    for key, value in data.items()}
        if isinstance(data, list | tuple):
            return [self.data(value, addresses) for value in data]
        return self.text(data, addresses) if isinstance(data, str) else data

    def _without_secrets(self, text: str) -> str:
        for secret in self._secrets:
            n_found = text.count(secret)
            if n_found:
                self.counts["secrets"] += n_found
                text = text.replace(secret, _HIDDEN)
        return text

    def _redact(self, text: str, addresses: bool) -> str:
        text = self._replaced(_TOKENS, "secrets", text, lambda found: _HIDDEN)
        text = self._replaced(_BEARER, "secrets", text, lambda found: f"{found[1]}{found[2]}{_HIDDEN}")
        text = self._replaced(_URL, "secrets", text, lambda found: _HIDDEN)
        for pattern in (_ASSIGNED, _OPTION):
            text = pattern.sub(self._assigned, text)
        text = self._replaced(_EMAIL, "users", text, lambda found: "someone@example.com")
        for home in self._homes:
            text = self._replaced(home, "homes", text, lambda found: "~")
        text = self._replaced(_ANY_HOME, "homes", text, lambda found: found["start"] + self._user(found["user"]))
        text = self._names(text)
        if addresses:
            text = self._replaced(_MAC, "cards", text, lambda found: self._card(found[0]))
            text = self._replaced(_GUID, "cards", text, lambda found: self._guid(found[0]))
            text = self._replaced(_IPV6, "addresses", text, self._ipv6)
            text = self._replaced(_IPV4, "addresses", text, self._ipv4)
        return text

    def _replaced(self, pattern: re.Pattern[str], kind: str, text: str, stand_in: Any) -> str:
        def replace(found: re.Match[str]) -> str:
            new = stand_in(found)
            self.counts[kind] += new != found[0]
            return str(new)

        return pattern.sub(replace, text)

    def _assigned(self, found: re.Match[str]) -> str:
        bare = found["value"].strip("\"'")
        if not is_secret_name(found["name"].replace("-", "_")) or not bare or bare.startswith(("(set", "(hidden")) or (
                bare.isdecimal()):
            return found[0]
        self.counts["secrets"] += 1
        quote = found["value"][0] if found["value"][0] in "\"'" else ""
        return f"{found['name']}{found['between']}{quote}{_HIDDEN}{quote}"

    def _names(self, text: str) -> str:
        for found in _NAMED.finditer(text):
            self._host(found["host"])
        for pattern in (*self._domains, _DOMAIN):
            text = self._replaced(pattern, "hosts", text, lambda found: self._host(found[0]))
        for host, stand_in in sorted(self._hosts.items(), key=lambda each: -len(each[0])):
            if host in text.lower():  # not within a longer word, nor before a dot and a word: vm.max_map_count
                pattern = re.compile(rf"(?<![\w.-])(?<!/sys/){re.escape(host)}(?![\w-]|\.[A-Za-z_])", re.I)
                text = self._replaced(pattern, "hosts", text, lambda found, name=stand_in: name)
        for user, stand_in in self._users.items():
            if user in text:
                pattern = re.compile(rf"(?<![\w-]){re.escape(user)}(?![\w-])")
                text = self._replaced(pattern, "users", text, lambda found, name=stand_in: name)
        return text

    def _user(self, name: str) -> str:
        if re.fullmatch(r"user-\d+", name):
            return name
        return self._users.setdefault(name, f"user-{len(self._users) + 1}")

    def _host(self, name: str) -> str:
        """Return the placeholder of a host; its name with a domain has the same one."""
        name = name.lower()
        if re.fullmatch(r"host-\d+", name) or name.startswith("localhost"):
            return name
        short = name.partition(".")[0]
        if name not in self._hosts:
            self._hosts[name] = self._hosts.setdefault(short, f"host-{len(set(self._hosts.values())) + 1}")
        return self._hosts[name]

    def _ipv4(self, found: re.Match[str]) -> str:
        try:
            return str(self._of_v4(ipaddress.IPv4Address(found[0])))
        except ValueError:
            return found[0]

    def _of_v4(self, address: ipaddress.IPv4Address) -> ipaddress.IPv4Address:
        if address.is_loopback or address.is_unspecified or int(address) >> 24 == 255 or address.is_multicast:
            return address
        network, number = self._number(int(address) >> 8, 4, int(address) & 0xff)
        return ipaddress.IPv4Address((10 << 24) | ((network % 65536) << 8) | (number % 256))

    def _ipv6(self, found: re.Match[str]) -> str:
        try:
            address = ipaddress.IPv6Address(found[0])
        except ValueError:
            return found[0]
        if address.is_loopback or address.is_unspecified or address.is_multicast or int(address) < 1 << 16:
            return found[0]
        if address.ipv4_mapped is not None:
            new = ipaddress.IPv6Address((0xffff << 32) | int(self._of_v4(address.ipv4_mapped)))
        elif int(address) >> 64 == 0xfe80 << 48:  # an interface of any network: the prefix tells nothing
            _, number = self._number("link", 6, int(address))
            new = ipaddress.IPv6Address((0xfe80 << 112) | number)
        else:
            network, number = self._number(int(address) >> 64, 6, int(address))
            new = ipaddress.IPv6Address((0xfd00 << 112) | (network << 64) | number)
        return new.exploded if len(found[0]) == 39 else str(new)

    def _number(self, network: Any, version: int, address: Any) -> tuple[int, int]:
        """Return numbers for a network and for an address in it, from 1 on, in order of first use."""
        key = version, network
        if key not in self._networks:
            self._networks[key] = sum(known[0] == version for known in self._networks) + 1, {}
        number, members = self._networks[key]
        return number, members.setdefault(address, len(members) + 1)

    def _card(self, name: str) -> str:
        if name.lower() in ("00:00:00:00:00:00", "ff:ff:ff:ff:ff:ff"):
            return name
        number = len(self._cards) + 1
        return self._cards.setdefault(name.lower(), f"02:00:00:00:{number >> 8:02x}:{number & 255:02x}")

    def _guid(self, name: str) -> str:
        if not name.strip("0:"):
            return name
        return self._guids.setdefault(name.lower(), f"0200:0000:0000:{len(self._guids) + 1:04x}")


def _forms(secret: str) -> set[str]:
    """Return the forms in which a secret may be written: as is, quoted for JSON, Python or a URL, in base64."""
    quoted = {secret, secret.strip(), json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1],
              repr(secret)[1:-1], urllib.parse.quote(secret), urllib.parse.quote(secret, safe=""),
              urllib.parse.quote_plus(secret), base64.b64encode(secret.encode("utf-8", "surrogateescape")).decode()}
    return {form for form in quoted if form}
