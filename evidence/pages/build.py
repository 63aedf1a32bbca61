"""The renderer of made pages: ``python -m evidence.pages.build [PAGE ...] [--check]``.

A template ``templates/docs/X.md.j2`` makes the page ``docs/X.md``; a name that begins with an
underscore is a layout. ``templates/sections/X.md.j2`` makes the lines between ``<!-- made: X -->``
and ``<!-- end: X -->`` of a page that people write. Numbers are looked up in committed records.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import click
import jinja2

from evidence.pages import formats, lookups
from evidence.published.runs import published
from experiments.output.files import write_text
from zenflow.errors import ConfigError, ZenFlowError

TEMPLATES = Path(__file__).parent / "templates"
WITH_SECTIONS = (
    "README.md",
    "docs/late_updates.md",
    "docs/limits.md",
    "docs/guides/trainers.md",
)
"""Pages that people write, with made sections."""
MADE_FOLDERS = ("docs/results", "docs/validation")
"""Folders without a hand-written page."""
_TOPIC = "docs/validation/_topic.md.j2"
_SECTION = re.compile(r"(<!-- made: ([\w-]+) -->\n).*?(\n<!-- end: \2 -->\n)", flags=re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A page that a template makes, whole or in sections."""

    path: str
    """Address of the page, from the repository's root."""
    template: str = ""
    """Name of the template that makes all of the page; empty where sections are made."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Names that the template is given."""

    def text(self) -> str:
        """Return the page as the records have it.

        Raises:
            ConfigError: A template asks for a number that no record has, or a mark is missing.
        """
        if self.template:
            return render(self.template, page=self.path, **self.values)
        written = (lookups.ROOT / self.path).read_text(encoding="utf-8")
        return with_sections(written, self.path)


def pages() -> list[Page]:
    """Return all made pages and all pages with made sections, but those of studies unmade yet."""
    names = sorted(path.relative_to(TEMPLATES).as_posix() for path in TEMPLATES.rglob("*.md.j2"))
    whole = [name for name in names if name.startswith("docs/") and "/_" not in name]
    whole = [name for name in whole if lookups.recorded(Path(name).name.removesuffix(".md.j2"))]
    topics = [
        Page(path=f"docs/validation/{topic}.md", template=_TOPIC, values={"topic": topic})
        for topic in published().topics
    ]
    return [
        *(Page(path=name.removesuffix(".j2"), template=name) for name in whole),
        *topics,
        *(Page(path=path) for path in WITH_SECTIONS),
    ]


def with_sections(text: str, page: str) -> str:
    """Return a page with its made sections as the records have them.

    Raises:
        ConfigError: A mark has no partner, or there is none.
    """
    count = text.count("<!-- made: ")
    made, replaced = _SECTION.subn(
        lambda m: m[1] + render(f"sections/{m[2]}.md.j2", page=page).strip("\n") + m[3], text
    )
    if not count or replaced != count or text.count("<!-- end: ") != count:
        raise ConfigError(
            f"{page} must have lines <!-- made: NAME --> and <!-- end: NAME --> in pairs, with "
            f"lines between, but {replaced} of {count} marks have a partner: put the marks back"
        )
    return made


def render(template: str, **values: Any) -> str:
    """Return the rendered text of a template.

    Raises:
        ConfigError: The template asks for what isn't there; the message has file, line and key.
    """
    try:
        return _environment(TEMPLATES).get_template(template).render(**values).rstrip() + "\n"
    except (jinja2.TemplateError, LookupError, TypeError, ValueError, ZenFlowError) as error:
        raise ConfigError(f"{_place(error) or template}: {error}") from error


@cache
def _environment(templates: Path) -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(templates),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= lookups.GLOBALS
    environment.filters |= formats.FILTERS
    return environment


def _place(error: Exception) -> str:
    """Return file and line of the template that failed, the innermost one."""
    if isinstance(error, jinja2.TemplateSyntaxError):
        return f"{error.name}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    found = [frame for frame in frames if frame.filename.endswith(".j2")]
    if not found:
        return ""
    return f"{Path(found[-1].filename).relative_to(TEMPLATES)}:{found[-1].lineno}"


def _asked(names: Sequence[str]) -> list[Page]:
    known = {page.path: page for page in pages()}
    for name in names:
        if name not in known:
            raise click.BadParameter(f"no page {name!r} is made; there are {', '.join(known)}")
    return [known[name] for name in names] or list(known.values())


def stale(asked: Iterable[Page]) -> Iterator[str]:
    """Yield the pages that differ from what the records say."""
    for page in asked:
        path = lookups.ROOT / page.path
        if not path.is_file() or path.read_text(encoding="utf-8") != page.text():
            yield page.path


def unmade() -> Iterator[str]:
    """Yield pages in folders of made ones that no template makes."""
    known = {page.path for page in pages()}
    for folder in MADE_FOLDERS:
        for path in (lookups.ROOT / folder).glob("*.md"):
            name = path.relative_to(lookups.ROOT).as_posix()
            if name not in known:
                yield f"{name} (no template makes it: remove it)"


@click.command()
@click.argument("names", nargs=-1, metavar="[PAGE ...]")
@click.option("--check", is_flag=True, help="Write nothing, and fail where a page would change.")
def main(names: Sequence[str], check: bool) -> None:
    """Write made pages from the committed records: all, or those named, as docs/results.md."""
    asked = _asked(names)
    try:
        if check:
            changed = [*stale(asked), *(() if names else unmade())]
            if changed:
                raise click.ClickException(f"not what the records say: {', '.join(changed)}")
            return
        for page in asked:
            write_text(lookups.ROOT / page.path, page.text())
            click.echo(f"wrote {page.path}")
    except ConfigError as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()
