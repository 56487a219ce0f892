"""The commands of ``bpsfast``, a file for each subject, and the group that imports a command when it is called.

`COMMANDS` names the module of each command and its line on the help page, so that ``bpsfast --help`` imports none.

Every command prints results on standard output, and logs and errors on standard error (`output.show`,
`exit_codes.exit_on_error`). ``--json`` prints one valid JSON document, also when the command fails.
"""
from __future__ import annotations

import difflib
import importlib
import json
from typing import Any

import click

from ...base import exit_codes

#: name -> (module, with ":attribute" if the command is not named `command`; help). Tools import no bench: names only.
COMMANDS = {
    "add": (".run:add", "Add workers to a running job started by `bpsfast run --elastic --control FILE`."),
    "bench": ("bpsfast.bench.cli", "Measure this machine: benchmarks that compare alternatives in one run."),
    "clean": (".clean", "Remove stale resources of killed jobs from this machine."),
    "compare": ("bpsfast.bench.compare", "Compare two result files of a benchmark, with confidence intervals."),
    "devices": (".rdma_devices:devices", "List RDMA devices and network cards: state, rate, MTU, NUMA, PCIe link."),
    "doctor": (".doctor", "Find out why RDMA does not work, and print the commands that fix it."),
    "explain": (".explain", "Explain an error code and what to do about it."),
    "gids": (".rdma_devices:gids", "List the GID table and the GID that would be used."),
    "info": (".info", "Show what is installed and works, and why the rest does not."),
    "ping": (".ping", "Test which hosts reach each other, over TCP and between all RDMA ports."),
    "plan": (".plan", "Predict communication and step time, and how many helpers pay off."),
    "simulate": (".simulate", "Simulate the time of a training step on a given cluster."),
    "report": (".report", "Write an archive for a bug report, without secrets and names."),
    "run": (".run", "Run a program as a job of several ranks, on this machine or on several hosts."),
    "perf": (".perf", "Measure bandwidth or latency between two machines, as perftest does."),
    "topo": (".topo", "Show the topology of a machine: GPUs, switches, sockets, network cards, link rates."),
    "top": (".top", "Watch a running job: traffic, sums and queues of nodes; steps, stalls and lag of ranks."),
    "trace": (".trace", "Merge the traces of a job's processes, or summarize where the time of a step went."),
    "tune": (".tune", "Find better settings by measuring, within a time budget."),
}


_TYPED = "bpsfast.typed"


class LazyGroup(click.Group):
    """A group whose commands in `COMMANDS` are imported when they run, not when the help page is shown."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return sorted({*super().list_commands(ctx), *COMMANDS})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command, importing its module if it is one of `COMMANDS`."""
        if cmd_name not in COMMANDS:
            return super().get_command(ctx, cmd_name)
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        return getattr(importlib.import_module(module, __name__), attribute or "command")

    def resolve_command(self, ctx: click.Context,
                        args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that *args* name; suggest the nearest one if there is none."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as exc:
            near = difflib.get_close_matches(args[0], self.list_commands(ctx), n=1, cutoff=0.6)
            hint = f"did you mean {near[0]}?" if near else "`bpsfast --help` lists all"
            raise click.UsageError(f"no such command: {args[0]}; {hint}", ctx) from exc

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Keep the arguments: an invalid command line may still ask for JSON."""
        ctx.meta[_TYPED] = list(args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; after a usage error with ``--json``, print it as a JSON document, too."""
        try:
            return super().invoke(ctx)
        except click.UsageError as exc:
            typed = ctx.meta[_TYPED]
            ours = typed[:typed.index("--")] if "--" in typed else typed
            command = exc.ctx.command if exc.ctx is not None else self
            if "--json" in ours and any(option.name == "as_json" for option in command.params):
                click.echo(json.dumps({"error": {"class": type(exc).__name__, "text": exc.format_message()}}))
            raise

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the meaning of exit codes."""
        with formatter.section("Exit codes of every command (of run: that of the first failed process)"):
            formatter.write_dl([(str(code), words) for code, words in exit_codes.WORDS.items()])

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
