"""Common parts of all commands: error messages, and how flags are given and read."""

from __future__ import annotations

import signal
from collections.abc import Callable
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


class Command(click.Command):
    """A command whose errors are told as click tells its own.

    A setting that can't be is an error of usage, until ``flags_were_right`` is called.
    """

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
