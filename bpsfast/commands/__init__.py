"""Commands of the command line that live in a file of their own, and the group that imports each when it is called.

`COMMANDS` says, by name, which module here defines the command (a `click.Command` named ``command``) and its line on
the help page, so that ``bpsfast --help`` imports none of them.

Conventions of every command (`output.show`, `exits.errors_in_words`): results on standard output, log and complaints
on standard error; ``--json`` prints one valid JSON document, also when the command fails; exit codes as in `exits`.
"""
from __future__ import annotations

import importlib

import click

#: name -> (module below bpsfast.commands, what the help page says)
COMMANDS = {
    "add": ("add", "Add workers to a running job that `bpsfast run --elastic --control FILE` has started."),
    "bench": ("bench", "Measure this machine: figures of one run beside each other."),
    "compare": ("compare", "Say which rows of a bench's result file are slower than in another, and how sure that is."),
    "devices": ("devices", "List RDMA devices and network cards: state, rate, MTU, NUMA node, PCIe link."),
    "doctor": ("doctor", "Find what keeps RDMA from working, and say what to type."),
    "explain": ("explain", "Say what an error code means and what to do about it."),
    "gids": ("gids", "List the GID table, and which GID would be used."),
    "ping": ("ping", "Try who reaches whom, over TCP and from each RDMA port to each."),
    "plan": ("plan", "Predict communication and step time, and say which helpers pay."),
    "simulate": ("simulate", "Time of a training step on machines that are not there, by simulated events."),
    "run": ("run", "Run a program as a job of several ranks, here or on several hosts."),
    "perf": ("perf", "Measure bandwidth or latency between two machines, as perftest does."),
    "topo": ("topo", "Show what is inside a machine: GPUs, switches, sockets, cards, and the rate of each link."),
    "trace": ("trace", "Merge the traces of a job's processes, or say where the time of its steps went."),
    "tune": ("tune", "Find better settings by measuring, within a budget of time."),
}


class LazyGroup(click.Group):
    """A group whose commands in `COMMANDS` are imported when they run, not when the help page is shown."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return sorted({*super().list_commands(ctx), *COMMANDS})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command, importing its module if it is one of `COMMANDS`."""
        if cmd_name not in COMMANDS:
            return super().get_command(ctx, cmd_name)
        return importlib.import_module(f"{__name__}.{COMMANDS[cmd_name][0]}").command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing those in `COMMANDS`."""
        rows = []
        for name in self.list_commands(ctx):
            if name in COMMANDS:
                rows.append((name, COMMANDS[name][1]))
            elif (own := super().get_command(ctx, name)) is not None and not own.hidden:
                rows.append((name, own.get_short_help_str(limit=100)))
        with formatter.section("Commands"):
            formatter.write_dl(rows)
