"""``bpsfast clean`` removes the stale resources of dead jobs from this machine."""
from __future__ import annotations

import sys
from typing import Any

import click

from ...base import exit_codes, output

_HEAD = ("KIND", "NAME", "LEFT BY", "WHAT")


@click.command()
@click.option("--yes", "-y", "is_agreed", is_flag=True, help="Remove without asking.")
@click.option("--dry-run", is_flag=True, help="List what would be removed, and remove nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document; removes only with --yes.")
@exit_codes.exit_on_error
def command(is_agreed: bool, dry_run: bool, as_json: bool) -> None:
    """Remove stale resources of dead jobs: processes, network namespaces and temporary folders.

    Removes only what bpsfast created for this user and whose owner has ended; it never touches a running job. A job
    cleans up after itself unless its launcher or benchmark was killed. Memory and sockets vanish with their processes.
    The next job replaces a control file (`bpsfast run --control FILE`).

    Exit code 0 if nothing is left, 1 if something is left, 3 if root is needed.

    \b
    bpsfast clean --dry-run
    bpsfast clean --yes --json
    """
    from ...launch import stale_resources

    if is_agreed and dry_run:
        raise click.UsageError("--yes and --dry-run: choose one")
    found = stale_resources.find()
    asks = found and not is_agreed and not dry_run and not as_json and sys.stdin.isatty() and sys.stdout.isatty()
    if found and not as_json:
        click.echo(output.table([_HEAD, *((each.kind, each.name, f"pid {each.owner_pid}", each.about)
                                            for each in found)]))
    if asks:
        is_agreed = click.confirm(f"Remove {_counted(len(found))}?")
    reasons = {each: reason for each, reason in stale_resources.remove(found)} if is_agreed else {}
    if as_json:
        rows: list[dict[str, Any]] = [
            {"kind": each.kind, "name": each.name, "owner_pid": each.owner_pid, "about": each.about,
             "removed": reasons.get(each) == "", "reason": reasons.get(each, "")} for each in found]
        output.show(output.OutputOptions(as_json=True), str, {"stale_resources": rows})
    elif not found:
        click.echo("no stale resources: no processes, network namespaces or temporary folders of dead jobs")
    for each, reason in reasons.items():
        if reason:
            click.echo(f"bpsfast: {each.kind} {each.name} is still there: {reason}", err=True)
    if is_agreed and not as_json and found:
        click.echo(f"removed {_counted(sum(not reason for reason in reasons.values()))}")
    if stale_resources.NEEDS_ROOT in reasons.values():
        sys.exit(exit_codes.ENVIRONMENT)
    if any(reasons.values()):
        sys.exit(exit_codes.FAILED)
    if found and not is_agreed and not dry_run:
        click.echo("bpsfast: nothing was removed; use --yes to remove", err=True)
        sys.exit(exit_codes.FAILED)


def _counted(number: int) -> str:
    return f"{number} resource{'' if number == 1 else 's'}"
