"""The options by which commands reach other hosts over ssh, the same for all of them."""
from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..orchestration.errors import ConfigError

if TYPE_CHECKING:
    from ..launch.hosts import Host
    from ..launch.ssh import Ssh

_SSH = ("ssh_port", "identity_file", "ssh_options", "remote_python", "remote_dir")


def hosts_option(function: Callable) -> Callable:
    """Add ``-H``; it arrives as the parameter *hosts_text*."""
    return click.option("-H", "--hosts", "hosts_text", metavar="HOST[:N],...",
                        help="Hosts, reached by ssh, and how many ranks on each.")(function)


def ssh_options(function: Callable) -> Callable:
    """Add the options that say how ssh reaches hosts, and what is run there; `take_ssh` reads them."""
    options: list[Callable[[Any], Any]] = [
        click.option("--ssh-port", type=click.IntRange(1, 65535), help="Port of sshd on all hosts."),
        click.option("--identity-file", type=click.Path(exists=True, dir_okay=False), metavar="FILE",
                     help="Private key for ssh."),
        click.option("--ssh-option", "ssh_options", multiple=True, metavar="NAME=VALUE",
                     help="Any option of ssh, as after its -o."),
        click.option("--remote-python", metavar="PATH", help="Python that has bpsfast on the hosts.  [default: the "
                     "path of the one here]"),
        click.option("--remote-dir", metavar="PATH", help="Working directory on the hosts.  [default: as here]"),
    ]
    for option in reversed(options):
        function = option(function)
    return function


def take_ssh(options: dict[str, Any]) -> Ssh:
    """Take the options of `ssh_options` out of *options*."""
    from ..launch.ssh import Ssh

    port, identity_file, more, python, directory = (options.pop(name) for name in _SSH)
    return Ssh(port=port, identity_file=identity_file and os.path.abspath(identity_file), options=more,
               python=python or sys.executable, directory=directory or os.getcwd(),
               python_path=_absolute(os.environ.get("PYTHONPATH", "")))


def given(options: Mapping[str, Any]) -> list[str]:
    """Return those options of `ssh_options` that were given, as they are typed."""
    typed = {"ssh_options": "--ssh-option"}
    return [typed.get(name, "--" + name.replace("_", "-")) for name in _SSH if options.get(name)]


def hosts_of(text: str | None, hostfile: Path | None) -> list[Host]:
    """Return the hosts that -H or --hostfile name; none if neither was given.

    Raises
    ------
    ConfigError
        If both were, or what they say is no list of hosts.
    """
    from ..launch import hosts

    if text is not None and hostfile is not None:
        raise ConfigError(f"-H {text} and --hostfile {hostfile} both say which hosts: give one of them")
    if text is not None:
        return hosts.parse(text)
    return [] if hostfile is None else hosts.read(hostfile)


def _absolute(path: str) -> str:
    """Return a PYTHONPATH that means the same from any folder."""
    return os.pathsep.join(os.path.abspath(part) for part in path.split(os.pathsep) if part)
