"""A group of commands whose help page says what each does in a whole sentence: click cuts it at the end of a line."""
from __future__ import annotations

import click

_MOST_CHARACTERS = 200


class FullHelpGroup(click.Group):
    """A group with the first sentence of each of its commands."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, self.commands[name].get_short_help_str(limit=_MOST_CHARACTERS))
                                for name in self.list_commands(ctx)])
