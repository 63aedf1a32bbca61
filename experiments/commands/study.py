"""``zenflow study`` and ``zenflow figures``: make studies, and check what they found before."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from experiments.commands.answer import Answer, Exit
from experiments.commands.command import OUTPUT, Command, option, with_flags
from experiments.commands.flag_types import NEW_FOLDER, PATH, FlagType
from experiments.output.target import check_folder
from zenflow.errors import ConfigError

if TYPE_CHECKING:
    from experiments.lab.study import Scope, Study

OUT = Path("runs") / "studies"
FIGURES = Path("runs") / "figures"
_PARTIAL = ".partial"
_WORK, _INPUT, _EXTENT = "What is done", "Input", "Extent"
"""Headings of the helps."""
_OF_SOME_STUDIES = ("data_dir", "dataset", "model")


class _Seeds(FlagType):
    """Whole numbers with commas between."""

    name = "seeds"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        """Return the seeds, each once."""
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in str(value).split(",") if part.strip()]
        if not parts or not all(part.isdecimal() for part in parts):
            self.fail(f"seeds are whole numbers with commas between, but got {value!r}: 0,1,2")
        return tuple(dict.fromkeys(map(int, parts)))


_common = with_flags(
    option("--list", "lists", is_flag=True, section=_WORK, help="Say what there is."),
    option("--check", "checks", is_flag=True, section=_WORK,
           help="Compare with the committed records; exit code 4 where something differs."),
    option("--rederive", "rederives", is_flag=True, section=_WORK,
           help="Write findings, page and picture of committed records anew, from their rows."),
    option("--force", is_flag=True, section=_WORK, help="Make again what is done already."),
    option("--smoke", is_flag=True, section=_EXTENT,
           help="Seconds: that it works, not what it shows."),
    option("--workers", type=click.IntRange(1), default=1, show_default=True, section=_EXTENT,
           help="Cells at a time, where none is timed."),
    option("--data-dir", type=PATH, section=_INPUT,
           help="Folder of texts: train.tsv and test.tsv (sentences, tab, 0 or 1), or such "
           "folders; a study that wants others names them."),
    option("--model", section=_INPUT,
           help="Pretrained model: a directory, a hub name, package:NAME."),
)  # fmt: skip
"""Flags that both commands have."""


@click.command(
    cls=Command,
    name="study",
    examples=[
        "zenflow study --list",
        "zenflow study whatif --smoke",
    ],
)
@click.argument("names", nargs=-1, metavar="[NAME]...")
@_common
@option("--dataset", section=_INPUT, help="In place of --data-dir a data set of the hub.")
@option("--seeds", type=_Seeds(), section=_EXTENT,
        help="Seeds, as in 0,1,2; default: the study's own.")  # fmt: skip
@option(
    "--minutes", type=click.FloatRange(min=0, min_open=True), section=_EXTENT,
    help="Begin no other cell of a study after so long: the record has those that are there.",
)  # fmt: skip
@option("--extend", is_flag=True, section=_EXTENT,
        help="Add missing cells to a record of another commit, if this one makes its first and "
        "last cell as they are.")  # fmt: skip
@option(
    "--record", type=NEW_FOLDER, default=OUT, show_default=True, section=OUTPUT,
    help="One folder a study goes here: its record.",
)  # fmt: skip
@option(
    "--keep", type=NEW_FOLDER, section=OUTPUT,
    help="Where cells are kept until the record is there; default: beside the records.",
)  # fmt: skip
def study_command(
    names: tuple[str, ...], record: Path, keep: Path | None, lists: bool, **flags: Any
) -> Answer:
    """Make studies: those that are named, a group such as paper, or all.

    Each leaves a record: its rows, findings with verdicts, tables and a picture. Cells that are
    there already are not made again, so after an interruption the same command goes on.
    --check derives the findings of the committed records again; a study that is named and needs
    no measurement is made for it. --rederive writes them, after a change of what is judged or
    shown. Exit code 4: a claim does not hold, or a record differs.
    """
    if not (names or lists or flags["checks"]):
        raise ConfigError("name studies, or say all: --list shows what there is")
    return _carry_out(names, record, keep, lists=lists, **flags)


@click.command(
    cls=Command,
    name="figures",
    examples=[
        "zenflow figures breakdown speedup",
    ],
)
@click.argument("names", nargs=-1, metavar="[NAME]...")
@_common
@option("--seed", type=click.IntRange(min=0), default=0, show_default=True, section=_EXTENT,
        help="Seed of all figures that train.")  # fmt: skip
@option("--out", type=NEW_FOLDER, default=FIGURES, show_default=True, section=OUTPUT,
        help="One folder a figure goes here.")  # fmt: skip
def figures_command(names: tuple[str, ...], seed: int, out: Path, **flags: Any) -> Answer:
    """Make figures of the ZenFlow paper again: all of them, or those that are named.

    Each leaves a record and a picture, and says which of the paper's claims hold. What is done
    already is left alone; after an interruption the same command goes on. --check compares with
    the committed records: figures that need no measurement are made for it, of others those in
    --out are taken. Exit code 4: a claim does not hold, or a record differs.
    """
    from experiments.lab.catalogue import PAPER

    return _carry_out(names, out, None, group=PAPER, seeds=(seed,), dataset=None, **flags)


def _carry_out(
    names: Sequence[str], out: Path, keep: Path | None, *, group: str | None = None, **flags: Any
) -> Answer:
    from rich.console import Console

    from experiments.commands.study_session import Session
    from experiments.lab import catalogue
    from experiments.lab.interrupts import ended_like_ctrl_c
    from experiments.lab.study import Scope

    studies = [catalogue.load(name) for name in catalogue.chosen(names, group)]
    of_committed = [name for name in ("checks", "rederives") if flags[name]]
    if len(of_committed) > 1:
        raise ConfigError("--check compares with what --rederive writes: choose one of them")
    if of_committed and flags["smoke"]:
        flag = {"checks": "--check", "rederives": "--rederive"}[of_committed[0]]
        raise ConfigError(f"{flag} is of whole studies: leave out --smoke")
    data_dir = flags["data_dir"]
    if data_dir is not None and not data_dir.is_dir():
        raise ConfigError(f"--data-dir {data_dir} is no directory: check the path")
    console = Console(highlight=False, soft_wrap=True)
    scope = Scope(**{name: flags[name] for name in ("smoke", "seeds", *_OF_SOME_STUDIES)})
    session = Session(
        out=out, keep=keep or out / _PARTIAL, scope=scope, force=flags["force"],
        seconds=None if flags.get("minutes") is None else 60 * flags["minutes"],
        extend=flags.get("extend", False), workers=flags["workers"],
        named=bool(names) and "all" not in names, group=group, console=console,
    )  # fmt: skip
    if flags["lists"]:
        return session.list(studies)
    if not of_committed:
        _refuse_unused(studies, names, scope)
        check_folder(out)
    try:
        with ended_like_ctrl_c():
            if flags["rederives"]:
                return session.rederive(studies)
            return session.check(studies) if flags["checks"] else session.make_all(studies)
    except (KeyboardInterrupt, click.Abort):
        console.print(
            f"Stopped. What is done is kept in {session.keep}: the same command goes on.",
            markup=False,
        )
        return Answer(
            record={"studies": session.told, "kept": str(session.keep)}, code=Exit.INTERRUPTED
        )


def _refuse_unused(studies: Sequence[Study], names: Sequence[str], scope: Scope) -> None:
    for name in _OF_SOME_STUDIES:
        if getattr(scope, name) is not None and not any(name in s.uses for s in studies):
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} is of no use to {', '.join(names)}: leave it out")
