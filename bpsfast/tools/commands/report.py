"""``bpsfast report`` writes an archive for a bug report, without secrets and names."""
from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import click

from ...base import exit_codes, output
from .. import bug_report, redaction


@click.command()
@click.argument("paths", metavar="[LOG]...", nargs=-1, type=click.Path(exists=True, path_type=Path))
@click.option("-o", "--output", "path", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="The archive.  [default: bpsfast-report-DATE-TIME.tar.gz]")
@click.option("--lines", "n_lines", type=click.IntRange(1), default=2000, show_default=True, metavar="N",
              help="Number of lines of each LOG, from its end.")
@click.option("--hide", "words", multiple=True, metavar="NAME", help="Also replace this host name; may be repeated.")
@click.option("--dry-run", is_flag=True, help="List what the archive would contain, and write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the contents and the path as one JSON document.")
@exit_codes.exit_on_error
def command(paths: tuple[Path, ...], path: Path | None, n_lines: int, words: tuple[str, ...], dry_run: bool,
            as_json: bool) -> None:
    """Write an archive for a bug report: this machine, its settings, and the LOGs you name (or all files in a folder).

    It contains info, settings with their origins, doctor, devices, GIDs, topology, Python packages, environment
    variables of bpsfast and related libraries, limits and the kernel's files about network cards. Secrets are removed;
    users, home folders, hosts, IP, MAC and GID addresses are each replaced by one placeholder. Check it before you
    send it.

    \b
    bpsfast report --dry-run
    bpsfast report train.log out/logs   files and folders (--tee-dir, trace_dir)
    bpsfast report --hide login1.example.org -o report.tar.gz
    """
    scrub = redaction.Redactor(redaction.found(os.environ, redaction.job_key_of(os.environ), words))
    logs, skipped = bug_report.named(paths)
    files, left_out = bug_report.gather(bug_report.entries(os.environ, logs, n_lines), scrub)
    files.insert(0, bug_report.readme(files, left_out))
    place = path or Path(time.strftime("bpsfast-report-%Y%m%d-%H%M%S.tar.gz"))
    nbytes = None if dry_run else bug_report.write(place, files)
    data: dict[str, Any] = {
        "path": None if dry_run else str(place), "nbytes": nbytes,
        "files": [{"name": file.name, "nbytes": len(file.content), "lines": file.n_lines, "about": file.about}
                  for file in files],
        "left_out": [{"name": each.name, "reason": each.reason} for each in (*skipped, *left_out)],
        "replaced": dict(scrub.counts)}
    output.show(output.OutputOptions(as_json), lambda: text(data), data)


def text(data: dict[str, Any]) -> str:
    """Return the contents of the archive as text."""
    rows = [("FILE", "BYTES", "WHAT"), *((each["name"], str(each["nbytes"]), each["about"]) for each in data["files"])]
    lines = [output.table(rows, right=(1,))]
    lines += [f"omitted: {each['name']}: {each['reason']}" for each in data["left_out"]]
    counts = ", ".join(f"{number} {kind}" for kind, number in sorted(data["replaced"].items()) if number)
    lines.append(f"replaced: {counts or 'nothing'}")
    if data["path"] is None:
        return "\n".join([*lines, "nothing was written (--dry-run)"])
    return "\n".join([
        *lines, "", f"{data['path']} ({data['nbytes']} bytes, readable only by you). Check it before you send it:",
        f"  tar -xzOf {data['path']} | less", f"  tar -xzf {data['path']} -C /tmp      # folder /tmp/bpsfast-report"])
