"""The notebooks run, are kept without outputs, and their copies in docs show what they say."""

import base64
import importlib.util
import re

import pytest
from click.testing import CliRunner

from experiments.report import notebooks as rendering
from tests.starts import environment

for package in ("ipykernel", "nbclient", "nbconvert", "nbformat"):
    if importlib.util.find_spec(package) is None:  # importing takes seconds of every worker
        pytest.skip(f"needs {package}", allow_module_level=True)

NAMES = rendering.notebook_names()
ORIGIN = {
    "commit": "0123456789ab",
    "hardware": {"cores": 2, "cpu": "Some CPU", "gpu": None},
    "versions": {"python": "3.11.7"},
}
PNG = base64.b64encode(b"\x89PNG picture").decode()


def code_of(notebook):
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


def prose_of(notebook):
    return [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]


def made(*outputs, prose="# Title\n\nFirst words."):
    """Return a notebook of one page with these outputs."""
    import nbformat

    cells = [
        nbformat.v4.new_markdown_cell(prose, id="about"),
        nbformat.v4.new_code_cell("1 + 1", id="sum", outputs=list(outputs)),
    ]
    return nbformat.v4.new_notebook(cells=cells)


def shown(**data):
    import nbformat

    named = {key.replace("_", "/"): value for key, value in data.items()}
    return nbformat.v4.new_output("display_data", named)


def test_the_five_pages_are_there():
    assert [name[:2] for name in NAMES] == ["01", "02", "03", "04", "05"]
    index = (rendering.NOTEBOOKS / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"\]\((\S+)\.ipynb\)", index) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_kept_without_outputs_and_with_ids_that_stay(name):
    import nbformat

    notebook = rendering.read_notebook(name)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) >= (4, 5)  # the first with ids
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert set(notebook.metadata.language_info) == {"name"}  # no version of whoever ran it last
    ids = [cell["id"] for cell in notebook.cells]
    assert len(set(ids)) == len(ids)
    for cell in notebook.cells:
        assert not cell.metadata, cell.id
        if cell.cell_type == "code":
            assert cell.execution_count is None, cell.id
            assert cell.outputs == [], cell.id


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_begins_with_what_it_teaches_how_long_it_takes_and_what_its_figures_are(name):
    opening = prose_of(rendering.read_notebook(name))[0]
    for words in (r"^# \d\. ", r"\*\*You learn\*\*", r"\*\*It takes\*\* about \w+ seconds"):
        assert re.search(words, opening), words
    assert re.search(r"\*(measured|simulated|emulated)\*", opening)


@pytest.mark.parametrize("name", NAMES)
def test_a_notebooks_links_lead_somewhere(name):
    for text in prose_of(rendering.read_notebook(name)):
        for link in re.findall(r"\]\((?!https?:)([^)]+)\)", text):
            assert (rendering.NOTEBOOKS / link).exists(), link


LESS = {
    "01-quickstart": {"range(28))[4:]": "range(9))[4:]", "torch.randn(512,": "torch.randn(32,"},
    "02-anatomy-of-a-stall": {'"qwen2.5-3b"': '"qwen2.5-0.5b"', '"own:mini"': '"own:tiny"'},
    "03-calibrate-and-validate": {
        "range(4)": "range(2)", "turns=2": "turns=1", "windows=2": "windows=1",
        '"own:mini"': '"own:tiny"',
    },
    "04-what-if-for-your-machine": {
        '"qwen2.5-3b", 4, 1024': '"qwen2.5-0.5b", 1, 512', "count=20": "count=3",
        "dram=25,50,100,200,400": "dram=25,400",
    },
    "05-auto-tuned-training": {
        '"llama-2-7b"': '"gpt2"', "num_trials=16": "num_trials=4", "steps=120": "steps=24",
    },
}  # fmt: skip
"""What takes long in the notebooks, and what takes its place here."""


@pytest.fixture(scope="module")
def one_kernel():
    """Let one kernel, emptied for each, run all notebooks: it loads their packages once."""
    import nbclient
    from jupyter_client.manager import KernelManager

    kernel, clients = KernelManager(kernel_name=rendering.KERNEL), []
    real = nbclient.NotebookClient

    def client_of_it(*args, **kwargs):
        clients.append(real(*args, km=kernel, **kwargs))
        return clients[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
        patch.setattr(nbclient, "NotebookClient", client_of_it)
        yield
    for client in clients:
        client.kc.stop_channels()
    kernel.shutdown_kernel(now=True)


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs(name, one_kernel):
    import nbformat

    notebook = rendering.read_notebook(name)
    for cell in notebook.cells:
        for long, short in LESS[name].items():
            cell.source = cell.source.replace(long, short)
    assert all(short in str(notebook) for short in LESS[name].values())
    notebook.cells.insert(0, nbformat.v4.new_code_cell("%reset -f"))
    rendering.execute(notebook)
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", ())]
    assert not [out.text for out in outputs if out.get("name") == "stderr"]
    assert any("image/png" in out.get("data", ()) for out in outputs)
    told = "".join(out.get("text", "") for out in outputs)
    assert "bit for bit: False" not in told


# ---- copies -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_copy_has_the_notebooks_present_source_and_says_where_it_was_made(name):
    notebook = rendering.read_notebook(name)
    copy = (rendering.RENDERED / f"{name}.md").read_text(encoding="utf-8")
    assert re.findall(r"^```python\n(.*?)\n```$", copy, re.DOTALL | re.MULTILINE) == code_of(
        notebook
    )
    text, _ = rendering.markdown(notebook, name, ORIGIN)  # without outputs
    place = 0
    for prose in re.split(r"^```python\n.*?\n```$|^\*Made from [^\n]*$", text, flags=re.S | re.M):
        place = copy.index(prose.strip(), place)
    assert re.search(r"^\*Made from .* commit [0-9a-f]{12}, on \d+ cores of .*\*$", copy, re.M)


def test_copies_have_their_pictures_and_there_are_no_others():
    folder = rendering.RENDERED
    assert sorted(path.stem for path in folder.glob("*.md")) == NAMES
    named = set()
    for path in folder.glob("*.md"):
        named |= set(re.findall(r"!\[.*?\]\((.*?)\)", path.read_text(encoding="utf-8")))
    there = {str(path.relative_to(folder)) for path in folder.glob("*/*")}
    assert named == there
    assert all((folder / path).stat().st_size < 300_000 for path in there)


def test_a_copy_takes_one_form_of_each_output_and_joins_texts():
    import nbformat

    table = (
        '<div><style scoped>\n.dataframe {}\n</style>\n<table class="dataframe">\n<tr>\n</table>'
    )
    notebook = made(
        nbformat.v4.new_output("stream", name="stdout", text="one\n"),
        shown(text_plain="\x1b[1mtwo\x1b[0m\n", text_html="<b>two</b>"),
        shown(text_plain="  a\n0 1", text_html=table),
        shown(text_plain="<Figure>", image_png=PNG),
    )
    text, pictures = rendering.markdown(notebook, "page", ORIGIN)
    assert "    one\n    two\n" in text
    assert '<table class="dataframe">\n<tr></table>' in text
    for left_out in ("\x1b", "<b>", "style", "0 1", "<Figure>"):
        assert left_out not in text
    ((path, picture),) = pictures.items()
    assert f"]({path})" in text
    assert path.startswith("page_files/")
    assert picture == b"\x89PNG picture"


def test_a_copys_second_paragraph_says_where_it_was_made():
    text, _ = rendering.markdown(made(), "page", ORIGIN)
    title, origin, rest = text.split("\n\n", 2)
    assert (title, rest.splitlines()[0]) == ("# Title", "First words.")
    for fact in ("notebooks/page.ipynb", "commit 0123456789ab", "2 cores of Some CPU", "no GPU"):
        assert fact in origin


def test_links_of_a_copy_lead_where_the_notebooks_do():
    prose = (
        "# Title\n\n[a](02-b.ipynb) [b](../docs/c.md) [c](README.md) [d](https://e.org/f.ipynb)"
    )
    text, _ = rendering.markdown(made(prose=prose), "page", ORIGIN)
    for link in ("(02-b.md)", "(../../docs/c.md)", "(../../notebooks/README.md)",
                 "(https://e.org/f.ipynb)"):  # fmt: skip
        assert link in text


@pytest.mark.usefixtures("one_kernel")
def test_a_page_that_fails_is_named_and_leaves_the_earlier_copy(tmp_path, monkeypatch):
    import nbformat

    monkeypatch.setattr(rendering, "NOTEBOOKS", tmp_path)
    page = made()
    page.cells[1].source = "raise RuntimeError('no such luck')"
    nbformat.write(page, tmp_path / "page.ipynb")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "page.md").write_text("earlier")
    done = CliRunner().invoke(rendering.main, ["--out", str(tmp_path / "out")])
    assert done.exit_code == 1
    assert "page was not rendered" in done.output
    assert "no such luck" in done.output
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["page.md"]
    assert (tmp_path / "out" / "page.md").read_text() == "earlier"


def test_an_unknown_page_is_refused_with_the_nearest_name(tmp_path):
    done = CliRunner().invoke(rendering.main, ["--out", str(tmp_path), "01-quikstart"])
    assert done.exit_code == 2
    assert "did you mean '01-quickstart'" in done.output
    assert not list(tmp_path.iterdir())
