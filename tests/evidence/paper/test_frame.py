import json

import click
import pytest
from click.testing import CliRunner

from experiments.cli import main
from experiments.lab import catalogue, check
from experiments.lab import record as records
from experiments.lab.study import NeedsInputError, Scope
from tests.evidence.paper.figures import Counting, use
from zenflow.errors import ConfigError, ZenFlowError


def run(*arguments):
    return CliRunner().invoke(main, ["figures", *map(str, arguments)])


def test_every_study_has_a_module_of_its_name():
    for name in catalogue.names():
        assert catalogue.load(name).key == name


def test_a_figure_is_made_once_and_again_when_it_is_forced(tmp_path, monkeypatch):
    counting = Counting()
    use(monkeypatch, counting.figure())
    assert run("--out", tmp_path).exit_code == 0
    assert "done already" in run("--out", tmp_path).output
    assert len(counting.jobs) == 1
    run("--out", tmp_path, "--seed", 1, "--force")
    assert len(counting.jobs) == 2


@pytest.mark.parametrize("flags", [["--seed", 1], ["--smoke"], []], ids=["seed", "smoke", "code"])
def test_a_record_of_other_settings_is_refused_and_stays(tmp_path, monkeypatch, flags):
    counting = Counting()
    use(monkeypatch, counting.figure())
    run("--out", tmp_path)
    before = (tmp_path / "plain" / "record.json").read_bytes()
    if not flags:
        use(monkeypatch, counting.figure(revision=2))
    result = run("--out", tmp_path, *flags)
    assert result.exit_code == 2
    assert "holds another study or other settings" in result.output
    assert "--force" in result.output
    assert (tmp_path / "plain" / "record.json").read_bytes() == before
    assert len(counting.jobs) == 1


def test_a_record_has_everything_and_nothing_else_is_left(tmp_path, monkeypatch):
    use(monkeypatch, Counting().figure())
    run("--out", tmp_path, "--seed", 3)
    names = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")}
    files = ("README.md", "picture.png", "record.json", "rows.jsonl")
    assert names == {"plain", *(f"plain/{name}" for name in files)}
    record = json.loads((tmp_path / "plain" / "record.json").read_text())
    assert record["config"] == {"revision": 1, "smoke": False, "seed": 3}
    (row,) = (tmp_path / "plain" / "rows.jsonl").read_text().splitlines()
    assert json.loads(row) == {"value": 2.0, "seconds": 1.0}
    assert record["findings"][0]["verdict"] == "holds"
    assert {"commit", "versions", "hardware", "seconds"} <= record.keys()


def test_a_lost_picture_is_drawn_from_the_record(tmp_path, monkeypatch):
    counting = Counting()
    use(monkeypatch, counting.figure())
    run("--out", tmp_path)
    (tmp_path / "plain" / "picture.png").unlink()
    run("--out", tmp_path)
    assert (tmp_path / "plain" / "picture.png").is_file()
    assert len(counting.jobs) == 1


def test_a_figure_that_fails_stops_no_other_and_leaves_the_old_record(tmp_path, monkeypatch):
    first, second = Counting("first"), Counting("second")
    use(monkeypatch, first.figure(), second.figure())
    run("--out", tmp_path)
    before = (tmp_path / "first" / "record.json").read_bytes()
    for error in (ZenFlowError("no link"), KeyError("k"), OSError("disk full")):
        first.error = error
        result = run("--out", tmp_path, "--force")
        assert result.exit_code == 1
        assert "Failed: first" in result.output
        assert "no link" in result.output or not isinstance(error, ZenFlowError)
        assert (tmp_path / "first" / "record.json").read_bytes() == before
    assert len(second.jobs) == 4


@pytest.mark.parametrize("error", [KeyboardInterrupt(), click.Abort()], ids=["ctrl-c", "abort"])
def test_after_ctrl_c_what_is_done_is_kept_and_the_same_command_goes_on(
    tmp_path, monkeypatch, error
):
    first, second = Counting("first"), Counting("second", error=error)
    use(monkeypatch, first.figure(), second.figure())
    result = run("--out", tmp_path)
    assert result.exit_code == 130
    assert "the same command goes on" in result.output
    assert not (tmp_path / "second").exists()
    (second.jobs[0].folder / "half").touch()
    second.error = None
    assert run("--out", tmp_path).exit_code == 0
    assert (len(first.jobs), len(second.jobs)) == (1, 2)
    assert second.jobs[1].folder == second.jobs[0].folder
    assert not second.jobs[1].folder.exists()


def test_what_an_interrupted_figure_kept_is_not_for_other_settings_nor_for_force(
    tmp_path, monkeypatch
):
    counting = Counting(error=KeyboardInterrupt())
    use(monkeypatch, counting.figure())
    run("--out", tmp_path)
    kept = counting.jobs[0].folder / "half"
    kept.touch()
    refused = run("--out", tmp_path, "--seed", 1)
    assert "seed was 0, now 1" in refused.output
    assert len(counting.jobs) == 1
    run("--out", tmp_path, "--force")
    assert counting.jobs[1].folder == counting.jobs[0].folder
    assert not kept.exists()


def test_data_and_model_go_to_figures_that_declare_them_alone(tmp_path, monkeypatch):
    plain, other = Counting("plain"), Counting("other")
    use(monkeypatch, plain.figure(), other.figure(uses=frozenset({"data_dir", "model"})))
    data = tmp_path / "sentences"
    data.mkdir()
    result = run("--out", tmp_path / "out", "--data-dir", data, "--model", "tiny")
    assert result.exit_code == 0
    assert (plain.jobs[0].data_dir, plain.jobs[0].model) == (None, None)
    assert (other.jobs[0].data_dir, other.jobs[0].model) == (data, "tiny")
    record = records.read(tmp_path / "out" / "other")
    assert record.config["data_dir"] == "sentences"
    refused = run("plain", "--model", "tiny")
    assert refused.exit_code == 2
    assert "--model is of no use to plain" in refused.output


def test_a_figure_without_its_input_takes_the_committed_record_or_says_what_it_needs(
    tmp_path, monkeypatch
):
    results = tmp_path / "results"
    monkeypatch.setattr(records, "RESULTS", results)
    counting = Counting()
    use(monkeypatch, counting.figure())
    run("--out", results / "2026-01-01_figures_cpu", "--seed", 5)
    counting.error = NeedsInputError("give --data-dir")
    result = run("--out", tmp_path / "out")
    assert result.exit_code == 0
    assert "committed record" in result.output
    assert records.read(tmp_path / "out" / "plain").config["seed"] == 5
    monkeypatch.setattr(records, "RESULTS", tmp_path / "none")
    assert "left out: give --data-dir" in run("--out", tmp_path / "new").output
    asked = run("--out", tmp_path / "new", "plain")
    assert asked.exit_code == 2
    assert "failed: give --data-dir" in asked.output


def test_bad_input_is_refused_before_work_starts(tmp_path):
    for arguments, message in (
        (["brakdown"], "no figure is called 'brakdown': did you mean breakdown"),
        (["naive-overlapp"], "did you mean naive_overlap"),
        (["zzzz"], "there are breakdown"),
        (["--smoke", "--check"], "--check is of whole studies: leave out --smoke"),
        (["--smoke", "--rederive"], "--rederive is of whole studies: leave out --smoke"),
        (["--check", "--rederive"], "choose one of them"),
        (["--data-dir", str(tmp_path / "nowhere")], "is no directory"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2
        assert message in " ".join(result.output.split())
    with pytest.raises(ConfigError, match="did you mean paper/pcie_bytes"):
        catalogue.load("paper/pcie")


def test_check_compares_each_number_and_verdict_within_the_tolerance(tmp_path, monkeypatch):
    results, out = tmp_path / "results", tmp_path / "out"
    monkeypatch.setattr(records, "RESULTS", results)
    counting = Counting()
    use(monkeypatch, counting.figure())
    run("--out", results / "2026-01-01_figures_cpu")
    # 4 % off is within the figure's tolerance and the claim's; "seconds" is not compared.
    counting.value = 2.08
    run("--out", out)
    result = run("--out", out, "--check")
    assert result.exit_code == 0
    assert "plain: made again, as committed" in result.output
    # 8 % off is within the figure's, but the claim no longer holds.
    counting.value = 2.16
    run("--out", out, "--force")
    result = run("--out", out, "--check")
    assert result.exit_code == 4
    assert "the value is 2: does not hold, committed: holds" in result.output
    assert "data.value" not in result.output
    counting.value = 3.0
    run("--out", out, "--force")
    assert "data.value: 3, committed: 2" in run("--out", out, "--check").output


def test_check_without_a_fresh_record_derives_findings_again(tmp_path, monkeypatch):
    results = tmp_path / "results"
    monkeypatch.setattr(records, "RESULTS", results)
    counting = Counting()
    use(monkeypatch, counting.figure())
    run("--out", results / "2026-01-01_figures_cpu")
    result = run("--out", tmp_path / "out", "--check")
    assert result.exit_code == 0
    assert "findings derived again, as committed" in result.output
    assert len(counting.jobs) == 1
    use(monkeypatch, counting.figure(findings=lambda data: []))
    assert run("--out", tmp_path / "out", "--check").exit_code == 4
    use(monkeypatch, counting.figure(about=lambda data: "Other words."))
    assert "README.md: not what its rows say" in run("--out", tmp_path, "--check").output
    use(monkeypatch, counting.figure(exact=True))
    run("--out", tmp_path / "out", "--check")
    assert len(counting.jobs) == 2, "what needs no measurement is made for it"


def test_a_committed_record_is_written_anew_from_its_rows(tmp_path, monkeypatch):
    results, out = tmp_path / "results", tmp_path / "out"
    folder = results / "2026-01-01_figures_cpu" / "plain"
    monkeypatch.setattr(records, "RESULTS", results)
    counting = Counting()
    use(monkeypatch, counting.figure())
    run("--out", folder.parent)
    before = json.loads((folder / "record.json").read_text())
    rows = (folder / "rows.jsonl").read_bytes()
    use(monkeypatch, counting.figure(findings=lambda data: [], about=lambda data: "Other words."))
    result = run("--out", out, "--rederive")
    assert result.exit_code == 0
    assert "plain: " in result.output
    assert "README.md: not what its rows say" in result.output
    after = json.loads((folder / "record.json").read_text())
    assert after == {**before, "findings": []} != before
    assert (folder / "rows.jsonl").read_bytes() == rows
    assert "Other words." in (folder / "README.md").read_text()
    assert len(counting.jobs) == 1, "no cell is made again"
    assert not out.exists()
    assert run("--out", out, "--check").exit_code == 0


@pytest.mark.parametrize(
    ("fresh", "expected"),
    [
        ({"a": [1.0, 2.0], "b": "x"}, []),
        ({"a": [1.0, 2.3], "b": "x"}, ["data.a[1]: 2.3, committed: 2 (allowed: 10.00%)"]),
        ({"a": [1.0], "b": "x"}, ["data.a: 1 entries, committed: 2"]),
        ({"a": [1.0, 2.0], "b": "y"}, ["data.b: 'y', committed: 'x'"]),
        ({"a": [1.0, None], "b": "x"}, ["data.a[1]: None, committed: 2.0"]),
        ({"a": [1.0, 2.0]}, ["data.b: only committed"]),
        ({"a": [1.0, 2.0], "b": "x", "c": 1}, ["data.c: only in the fresh one"]),
    ],
)
def test_differences_name_their_place(tmp_path, fresh, expected):
    figure = Counting().figure(findings=lambda data: [])
    config = figure.config(Scope())
    kept = records.write(tmp_path / "kept", figure, config, [{"a": [1.0, 2.0], "b": "x"}], 0.0)
    again = records.write(tmp_path / "fresh", figure, config, [fresh], 0.0)
    assert check.differences(figure, again, kept) == expected


def test_a_torn_or_foreign_record_is_refused_and_made_again_by_force(tmp_path, monkeypatch):
    counting = Counting()
    use(monkeypatch, counting.figure())
    run("--out", tmp_path)
    path = tmp_path / "plain" / "record.json"
    for text in ("{", "[]", '{"format": 99}', "{}"):
        path.write_text(text)
        with pytest.raises(ConfigError, match="plain"):
            records.read(path.parent)
        refused = run("--out", tmp_path)
        assert refused.exit_code == 2
        assert "--force" in refused.output
        assert run("--out", tmp_path, "--force").exit_code == 0
        assert records.read(path.parent).name == "paper/plain"
    assert len(counting.jobs) == 5


def test_the_newest_record_counts_and_shows_each_kind_of_number_in_its_column(
    tmp_path, monkeypatch
):
    counting = Counting()
    use(monkeypatch, counting.figure())
    for day, value in (("02", 5.0), ("01", 2.0)):
        counting.value = value
        run("plain", "--out", tmp_path / f"2026-01-{day}_figures_cpu")
    found = records.committed("paper/plain", tmp_path)
    assert found.folder.parent.name == "2026-01-02_figures_cpu"
    text = (found.folder / records.README).read_text()
    assert "| the value is 2 | a test | 2 | within 5% | 5 | **does not hold** |" in text


def test_a_record_whose_findings_are_on_a_page_counts_them_and_links_to_it(tmp_path, monkeypatch):
    use(monkeypatch, Counting().figure(page="docs/validation.md"))
    run("--out", tmp_path)
    text = (tmp_path / "plain" / records.README).read_text()
    assert "1 of 1 claims hold. [docs/validation.md](../../../docs/validation.md)" in text
    assert "| claim |" not in text
