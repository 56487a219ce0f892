"""``python -m bpsfast.bench.claims``: the numbers of the READMEs are those of the result files.

Each claim is some words of a page with fields in them, and how the fields follow from `bench/results`. Without options
it says what is different; with ``--write``, as at the end of ``make results``, numbers are replaced where they stand.
Words around them are nobody's but ours: they are to be read again when a number has changed.
"""
from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import click

from bpsfast.base import exit_codes
from bpsfast.bench import drawn
from bpsfast.bench.claims import readme, tables
from bpsfast.bench.claims.claim import Claim
from bpsfast.orchestration.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
#: By page, whose path begins at the project's folder.
CLAIMS = {"README.md": readme.CLAIMS, "bench/README.md": tables.CLAIMS}


class Difference(NamedTuple):
    """A claim whose numbers in the text are not those of its file."""

    claim: Claim
    said: list[str]
    measured: list[str]

    def __str__(self) -> str:
        return (f"{self.claim.file}: {', '.join(self.measured)} where the page says {', '.join(self.said)} "
                f"({self.claim.words!r})")


def differences(text: str, claims: Iterable[Claim], results: Path = drawn.RESULTS) -> Iterator[Difference]:
    """Yield the *claims* that *text* makes with other numbers than the files in *results*.

    Raises
    ------
    ConfigError
        A claim's words do not stand in *text* once; or its file is missing.
    """
    for claim in claims:
        found = claim.pattern().findall(text)
        if len(found) != 1:
            raise ConfigError(f"these words stand {len(found)} times in the text, not once: {claim.words!r}; "
                              "bench/claims has to say what the text says")
        said = [found[0]] if isinstance(found[0], str) else list(found[0])
        measured = claim.measured(results)
        if said != measured:
            yield Difference(claim, said, measured)


def renewed(text: str, different: Iterable[Difference]) -> str:
    """Return *text* with the numbers that were measured; line breaks stay where they are."""
    for claim, _, measured in different:
        match = claim.pattern().search(text)
        assert match is not None, "it was found there"
        for group in range(len(measured), 0, -1):
            text = text[:match.start(group)] + measured[group - 1] + text[match.end(group):]
    return text


def renew(folder: Path = ROOT, results: Path = drawn.RESULTS, write: bool = True) -> list[tuple[str, Difference]]:
    """Return what the pages in *folder* say otherwise than *results*, by page, and, if it is to be written, say it."""
    found = []
    for page, claims in CLAIMS.items():
        text = (folder / page).read_text(encoding="utf-8")
        different = list(differences(text, claims, results))
        if write and different:
            (folder / page).write_text(renewed(text, different), encoding="utf-8")
        found += [(page, each) for each in different]
    return found


@click.command()
@click.option("--write", is_flag=True, help="Replace the numbers; read the words around them again.")
@exit_codes.exit_on_error
def main(write: bool) -> None:
    """Say which numbers of the READMEs are not those of their result files. Exit code 1 if there are any."""
    found = renew(write=write)
    for page, each in found:
        click.echo(f"{page}: {each}")
    n = sum(map(len, CLAIMS.values()))
    click.echo(f"{n - len(found)} of {n} claims are those of their files"
               + (", the others are now" if write and found else ""))
    if found and not write:
        sys.exit(exit_codes.FAILED)
