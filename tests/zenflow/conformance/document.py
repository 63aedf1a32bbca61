"""The table of refusals in docs/limits.md.

``python -m tests.zenflow.conformance.document`` writes it; a test of the pages compares it with
the suite's.
"""

from collections.abc import Iterable, Iterator

from evidence.pages.headlines import ROOT
from evidence.pages.results import with_part
from experiments.output.files import write_text
from tests.zenflow.conformance.refusals import OF_RELEASE_MODE, REFUSALS, Refusal

DOCUMENT = ROOT / "docs" / "limits.md"


def document(text: str) -> str:
    """Return the page with the refusals as the suite has them."""
    groups = REFUSALS | {"In release mode only": OF_RELEASE_MODE}
    return with_part(text, "refusals", "\n".join(_tables(groups.items())).strip())


def _tables(groups: Iterable[tuple[str, list[Refusal]]]) -> Iterator[str]:
    for title, refusals in groups:
        yield from ("", f"{title}:", "")
        yield from (
            "| what | torch.optim.AdamW | error, as its message begins |",
            "|---|---|---|",
        )
        for refusal in refusals:
            torchs = "takes it" if refusal.torch is None else f"`{refusal.torch.__name__}`"
            yield f"| {refusal.what} | {torchs} | `{refusal.error.__name__}: {refusal.says}` |"


if __name__ == "__main__":
    write_text(DOCUMENT, document(DOCUMENT.read_text(encoding="utf-8")))
