"""Common parts of all commands: errors, flags under headings of a help, examples below it."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from zenflow.errors import ConfigError, ZenFlowError

Function = TypeVar("Function", bound=Callable[..., Any])


_FLAGS_WERE_RIGHT = "zenflow.flags_were_right"


def flags_were_right(context: click.Context) -> None:
    """Have errors from here on told without the words on a command's usage."""
    context.meta[_FLAGS_WERE_RIGHT] = True


class Refusal(click.ClickException):
    """Error of a well-formed command that is refused: for its data, model or machine."""

    exit_code = click.UsageError.exit_code


class Flag(click.Option):
    """An option with a place in its command's help, and perhaps with a word or without.

    click's own pairs of flags take no value, and two options of one name share theirs.
    """

    def __init__(self, *args: Any, section: str = "", bare: str | None = None, **how: Any) -> None:
        """Take what click's options take.

        Args:
            args: Names.
            section: Heading of the help.
            bare: Word that the flag stands for without one; ``--no-...`` then stands for "no".
            how: Of click's option.
        """
        if bare is not None:
            how |= {"is_flag": False, "flag_value": bare}
        super().__init__(*args, **how)
        self.section = section
        names = [] if bare is None else self.opts
        self._negations = [f"--no-{name.removeprefix('--')}" for name in names]

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        """Add the negation as well."""
        super().add_to_parser(parser, ctx)
        if self._negations:
            parser.add_option(
                obj=self, opts=self._negations, dest=self.name, action="store_const", const="no"
            )

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return names with the negation, and the help."""
        record = super().get_help_record(ctx)
        return record and (" / ".join([record[0], *self._negations]), record[1])


option = functools.partial(click.option, cls=Flag)
"""Decorator of a `Flag`."""


class Command(click.Command):
    """A command whose errors are told as click tells its own.

    A setting that can't be is an error of usage, until ``flags_were_right`` is called.
    """

    def __init__(self, *args: Any, examples: Sequence[str] = (), **how: Any) -> None:
        """Take what click's commands take.

        Args:
            args: As of click's.
            examples: Command lines below the help.
            how: As of click's.
        """
        super().__init__(*args, **how)
        self.examples = examples

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write flags under their headings, in the order in which headings first appear."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for flag in self.get_params(ctx):
            record = flag.get_help_record(ctx) if isinstance(flag, click.Option) else None
            if record is not None:
                heading = getattr(flag, "section", "") or "Options"
                sections.setdefault(heading, []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples."""
        if self.examples:
            with formatter.section("Examples"):
                for line in self.examples:
                    formatter.write(f"{'':{formatter.current_indent}}{line}\n")

    def invoke(self, ctx: click.Context) -> Any:
        """Carry it out; what is refused leaves with 2, Ctrl-C with 130."""
        try:
            return super().invoke(ctx)
        except ConfigError as error:
            if ctx.meta.get(_FLAGS_WERE_RIGHT):
                raise Refusal(str(error)) from error
            raise click.UsageError(str(error), ctx) from error
        except ZenFlowError as error:
            raise click.ClickException(str(error)) from error
        except OSError as error:
            if error.filename is None:  # a closed pipe, which click itself leaves by
                raise
            raise click.ClickException(f"{error.filename}: {error.strerror}") from error
        except KeyboardInterrupt:  # click's own way out says 1, as of any error
            click.echo("\nstopped", err=True)
            ctx.exit(128 + signal.SIGINT)


def with_flags(*options: Callable[[Any], Any]) -> Callable[[Function], Function]:
    """Return the decorator that gives a command these options, in this order."""

    def give(command: Function) -> Function:
        for option in reversed(options):
            command = option(command)
        return command

    return give


def given(context: click.Context) -> dict[str, Any]:
    """Return the flags that stand on the command line, by parameter, and nothing else."""
    return {
        name: value
        for name, value in context.params.items()
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
    }


def flag_of(context: click.Context, name: str) -> str:
    """Return how a parameter is written on the command line."""
    return next(item.opts[0] for item in context.command.params if item.name == name)
