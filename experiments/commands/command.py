"""Common parts of all commands: errors, flags under headings of a help, examples below it."""

from __future__ import annotations

import functools
import itertools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from typing import Any, TypeVar

import click

from experiments.commands.answer import Answer, Exit
from experiments.output.files import strict
from zenflow.errors import ConfigError, NoRoomError, ZenFlowError

Function = TypeVar("Function", bound=Callable[..., Any])

OUTPUT = "Output"
"""Heading of flags on what a command prints and writes."""
_FLAGS_WERE_RIGHT = "zenflow.flags_were_right"
_AS_JSON = "zenflow.as_json"


def flags_were_right(context: click.Context) -> None:
    """Have errors from here on told without the words on a command's usage."""
    context.meta[_FLAGS_WERE_RIGHT] = True


class Refusal(click.ClickException):
    """Error of a well-formed command that is refused: for its data, model or machine."""

    exit_code = Exit.REFUSED


class _NoRoom(click.ClickException):
    """Error of a command for which the machine is too small."""

    exit_code = Exit.NO_ROOM


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


def _note_json(context: click.Context, param: click.Parameter, value: bool) -> None:
    del param
    context.meta[_AS_JSON] = value


class Command(click.Command):
    """A command that returns an `Answer`, and whose errors are told as click tells its own.

    ``--json`` is a flag of every command. With that the answer's record alone is written to
    standard output, and all else goes to standard error. A setting that can't be is an error of
    usage, until ``flags_were_right`` is called.
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
        self.params.append(
            Flag(
                ["--json"], is_flag=True, expose_value=False, callback=_note_json,
                section=OUTPUT,
                help="Print the result as JSON (seconds, bytes), and all else on standard error.",
            )
        )  # fmt: skip

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write flags under their headings, in the order in which these appear, output last."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for flag in self.get_params(ctx):
            record = flag.get_help_record(ctx) if isinstance(flag, click.Option) else None
            if record is not None:
                heading = getattr(flag, "section", OUTPUT)
                sections.setdefault(heading, []).append(record)
        sections[OUTPUT] = sections.pop(OUTPUT)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples."""
        with formatter.section("Examples"):
            for line in self.examples:
                formatter.write(f"{'':{formatter.current_indent}}{line}\n")

    def invoke(self, ctx: click.Context) -> None:
        """Carry it out, give its answer, and leave with a code of `Exit`."""
        as_json = ctx.meta.get(_AS_JSON, False)
        try:
            with redirect_stdout(sys.stderr) if as_json else nullcontext():
                answer: Answer | None = super().invoke(ctx)
                if answer is not None and not as_json:
                    answer.show()
        except NoRoomError as error:
            raise _NoRoom(str(error)) from error
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
            ctx.exit(Exit.INTERRUPTED)
        if answer is None:
            return
        if as_json and answer.record is not None:
            click.echo(json.dumps(strict(answer.record), indent=2, allow_nan=False))
        ctx.exit(answer.code)


class Commands(click.Group):
    """Commands in groups, with their first sentences whole, and the exit codes of all."""

    def __init__(
        self, *args: Any, groups: Mapping[str, Sequence[click.Command]], **how: Any
    ) -> None:
        """Take what click's groups take.

        Args:
            args: As of click's.
            groups: Commands by heading, in the order of the help.
            how: As of click's.
        """
        super().__init__(*args, **how)
        self._groups = groups
        for command in itertools.chain(*groups.values()):
            self.add_command(command)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write each group under its heading."""
        width = max(map(len, self.commands))
        for heading, commands in self._groups.items():
            with formatter.section(heading):
                formatter.write_dl(
                    [(f"{c.name:{width}}", c.get_short_help_str(limit=200)) for c in commands]
                )

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the exit codes."""
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(int(code)), code.meaning) for code in Exit])


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
