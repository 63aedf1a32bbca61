"""Files of published runs: rows with what their groups share, times of a step, and refusals."""

import re

import pytest

from evidence.published.memory import memory_cases
from evidence.published.runs import published
from experiments.paper.setups import HostPass, Phases
from sim.models.table import find_model
from zenflow.errors import ConfigError

INDEX = """
files = ["page"]
not_predicted = ["A run: it has no machine."]
[alternatives]
"slow link" = { "link.d2h" = 1e9 }
"""
PAGE = """
title = "A page"

[group]
title = "A group"
entered = "blind"
open = ["host"]
doubts = "The host is not named."
source = "someone/somewhere"
assumption = "a DGX"
machine = "dgx-a100-80"
devices = 8
hosts = 2
model = "llama-2-7b"
strategy = "fsdp2"
options = { optimizer = "foreach", float32_reduce = true }
batch_size = 3
sequence = 1024
accumulation = 2
"""


@pytest.fixture
def load(tmp_path):
    """Return a function that loads a page of these keys and rows."""

    def loaded(rows, page=PAGE, index=INDEX):
        (tmp_path / "index.toml").write_text(index)
        (tmp_path / "page.toml").write_text(f"{page}\n{rows}\n")
        return published(tmp_path)

    published.cache_clear()
    yield loaded
    published.cache_clear()


def only(found):
    (row,) = found.measurements
    return row


def test_a_row_has_its_own_keys_and_those_of_all_tables_around_it(load):
    found = load("""
        [[group.rows]]
        batch_size = 5
        options = {}
        rows = [
          { label = "first", seconds = 1.5 },
          { label = "second", seconds = 2.5, batch_size = 7, source = "another/place" },
        ]
        [[group.rows]]
        label = "third"
        milliseconds = 250
        quantity = "compute"
    """)
    first, second, third = found.measurements
    assert (first.setup.batch_size, first.setup.options) == (5, {})
    assert (second.setup.batch_size, second.source) == (7, "another/place")
    assert (third.setup.batch_size, third.seconds, third.quantity) == (3, 0.25, "compute")
    assert third.setup.options == {"optimizer": "foreach", "float32_reduce": True}
    assert {row.group for row in found.measurements} == {"group"} == found.groups.keys()
    assert found.topics == {"page": ("A page", ("group",))}
    assert found.groups["group"].is_blind
    assert found.groups["group"].open == ("host",)


@pytest.mark.parametrize(
    ("printed", "seconds"),
    [
        ("seconds = 3.5", 3.5),
        ("milliseconds = 3500", 3.5),
        ("hours = 0.5", 1800),
        ("seconds = 30, of_steps = 20", 1.5),
        ("seconds = 30, of_sequences = 960", 3),  # 96 a step
        ("seconds_per_micro_batch = 1.5", 3),
        ("steps_per_second = 4", 0.25),
        ("sequences_per_second = 48", 2),
        ("tokens_per_second = 49_152", 2),
        ("tokens_per_second_per_device = 3072", 2),
        ("teraflops_per_device = 200, step_flops = 1e15", 5),
    ],
)
def test_a_time_is_of_one_step_of_all_devices_whatever_is_printed(printed, seconds, load):
    assert only(load(f'rows = [{{ label = "a", {printed} }}]')).seconds == seconds


def test_the_keys_of_a_row_say_what_kind_of_set_up_it_is(load):
    page = PAGE[: PAGE.index("devices")]
    host = only(load('rows = [{ label = "a", billion_parameters_per_second = 4, devices = 2, '
                     "num_params = 8e9 }]", page))  # fmt: skip
    assert host.setup == HostPass(machine="dgx-a100-80", devices=2, num_params=8e9)
    assert (host.seconds, host.quantity) == (2, "host")
    published.cache_clear()
    phases = "num_params = 7, forward = 1.0, backward = 2, d2h = 3, update = 4, h2d = 5"
    found = only(load(f'rows = [{{ label = "a", seconds = 1, strategy = "zenflow", {phases} }}]',
                      page.replace('machine = "dgx-a100-80"', "")))  # fmt: skip
    assert isinstance(found.setup, Phases)


def test_a_configuration_is_laid_over_the_groups_and_the_tables(load):
    found = load("""
        models.mine = { model_type = "gpt2", n_embd = 64, n_layer = 2 }
        config = { dropout = 0.5 }
        rows = [
          { label = "table", seconds = 1 },
          { label = "own", seconds = 1, model = "mine" },
          { label = "own, wider", seconds = 1, model = "mine", config = { n_embd = 128 } },
        ]
    """)
    table, own, wider = (row.setup.config for row in found.measurements)
    assert table == {**find_model("llama-2-7b")[1], "dropout": 0.5}
    assert own == {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "dropout": 0.5}
    assert wider == {**own, "n_embd": 128}
    published.cache_clear()
    assert only(load('rows = [{ label = "a", seconds = 1 }]')).setup.config is None


def test_an_alternative_is_a_shared_one_or_differs_from_its_row(load):
    row = only(
        load("""
        alternatives = ["slow link", { text = "smaller", batch_size = 2, attention = "eager" }]
        rows = [{ label = "a", seconds = 1, batch_size = 9 }]
    """)
    )
    slow, smaller = row.alternatives
    assert (slow.text, slow.setup, slow.values) == ("slow link", None, {"link.d2h": 1e9})
    assert (smaller.setup.attention, smaller.setup.batch_size) == ("eager", 2)
    assert (smaller.setup.sequence, smaller.values) == (1024, {})


ROW = 'rows = [{ label = "a row", seconds = 1 }]'


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ("seconds = 1, sequenze = 8", "key 'sequenze' is unknown; did you mean 'sequence'?"),
        ("seconds = 1, num_params = 1e9", "key 'hosts' is unknown"),  # a pass is of one host
        ("batch_size = 2", "one time or rate, this one has none"),
        ("seconds = 1, tokens_per_second = 2", "has ['seconds', 'tokens_per_second']"),
        ("seconds = 0", "seconds must be a positive number, got 0"),
        ('seconds = "1"', "seconds must be a positive number, got '1'"),
        ("tokens_per_second = 2, of_steps = 3", "belong to a time"),
        ("seconds = 2, of_steps = 3, of_sequences = 3", "not of both"),
        ("teraflops_per_device = 2", "which needs step_flops"),
        ("billion_parameters_per_second = 2", "a Setup cannot have billion_parameters_per_second"),
        ("seconds = 1, batch_size = 2.5", "batch_size must be int, got 2.5"),
        ("seconds = 1, devices = true", "devices must be int, got True"),
        ('seconds = 1, source = ""', "source must be str, got ''"),
        ('seconds = 1, quantity = "epoch"', "quantity must be one of step, stall"),
        ('seconds = 1, alternatives = ["slow lnk"]', "did you mean 'slow link'?"),
        ('seconds = 1, alternatives = [{ text = "b" }]', "an alternative has text, and values"),
        ('seconds = 1, alternatives = [{ text = "b", attentoin = "eager" }]', "'attention'?"),
    ],
)
def test_a_row_that_is_not_right_is_refused_with_its_place(keys, said, load):
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        load(f'rows = [{{ label = "a row", {keys} }}]')
    assert "page.toml, group, 'a row'" in str(caught.value)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (f'assumtion = "b"\n{ROW}', "page.toml, group: key 'assumtion' is unknown; did you mean"),
        ("rows = [{ seconds = 1 }]", "page.toml, group: a row lacks label"),
        ("rows = []", "page.toml, group: rows must be a list of tables, at least one"),
        ("", "page.toml, group: rows must be a list of tables, at least one"),
        ("[[group.rows]]\nrows = 2", "page.toml, group: rows must be a list of tables"),
        ("models.mine = { n_embd = 1 }\n" + ROW, "group: no row has the models ['mine']"),
        (f"{ROW}\n[group]", "page.toml is not TOML"),
        (f"{ROW[:-1]}, {ROW[8:]}", "two rows have the label and source ('a row', 'someone/some"),
    ],
)
def test_rows_that_are_not_right_are_refused_with_their_place(rows, said, load):
    with pytest.raises(ConfigError, match=re.escape(said)):
        load(rows)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('title = "A page"', "", "page.toml lacks title"),
        ('title = "A page"', 'title = "A page"\nnumber = 2', "number is outside of all groups"),
        ('title = "A group"', "", "page.toml, group lacks title"),
        ('doubts = "The host is not named."', "", "page.toml, group lacks doubts"),
        (
            '"blind"',
            '"blnd"',
            "blind, last, third, fourth, fifth, sixth, got 'blnd'",
        ),
        ('["host"]', '["hosts"]', "page.toml, group: open must be"),
        ('source = "someone/somewhere"', "", "page.toml, group, 'a row' lacks source"),
        ("sequence = 1024", "", "page.toml, group, 'a row' lacks sequence"),
    ],
)
def test_a_group_that_is_not_right_is_refused_with_its_place(old, new, said, load):
    assert old in PAGE
    with pytest.raises(ConfigError, match=re.escape(said)):
        load(ROW, PAGE.replace(old, new, 1))


def test_the_index_has_every_file_and_no_two_files_one_group(load, tmp_path):
    both = INDEX.replace('"page"', '"page", "other"')
    with pytest.raises(ConfigError, match="only listed: other"):
        load(ROW, index=both)
    (tmp_path / "other.toml").write_text(PAGE + ROW)
    with pytest.raises(ConfigError, match="only there or only listed: other"):
        load(ROW)
    with pytest.raises(ConfigError, match=r"other\.toml, group: another file has a group"):
        load(ROW, index=both)
    with pytest.raises(ConfigError, match="key 'pages' is unknown"):
        load(ROW, index=f"pages = 2\n{INDEX}")
    with pytest.raises(ConfigError, match=r"index\.toml lacks not_predicted"):
        load(ROW, index=INDEX.replace("not_predicted", "# "))


# ---- memory -------------------------------------------------------------------------------------

CASE = """
[group]
source = "someone/somewhere"
assumption = "a DGX"
machine = "dgx-a100-80"
devices = 1
model = "llama-2-7b"
strategy = "ddp"
batch_size = 1
sequence = 512
"""


@pytest.fixture
def cases(tmp_path):
    """Return a function that loads a file of memory cases."""

    def loaded(text):
        (tmp_path / "index.toml").write_text('files = ["cases"]')
        (tmp_path / "cases.toml").write_text(text)
        memory_cases.cache_clear()
        return memory_cases(tmp_path)

    yield loaded
    memory_cases.cache_clear()


def test_a_case_has_a_peak_in_bytes_or_an_outcome_alone(cases):
    found = cases(
        CASE
        + """
        rows = [
          { label = "a", gigabytes = 1.5 },
          { label = "b", gibibytes = 1.5, scope = "device" },
          { label = "c", mebibytes = 1.5 },
          { label = "d", fits = false },
        ]
    """
    )
    assert [case.peak for case in found] == [1.5e9, 1.5 * 2**30, 1.5 * 2**20, None]
    assert [case.fits for case in found] == [True, True, True, False]
    assert [case.scope for case in found] == ["allocated", "device", "allocated", "allocated"]


def test_a_timed_case_is_the_run_of_its_time_but_for_what_it_says(cases):
    row = next(row for row in published().measurements if row.label == "LLaMA-7B, ZeRO-2")
    same, other = cases("""
        [group]
        rows = [
          { label = "LLaMA-7B, ZeRO-2", timed = true },
          { label = "b", timed = "LLaMA-7B, ZeRO-2", batch_size = 9, assumption = "more" },
        ]
    """)
    assert (same.setup, same.source, same.assumption) == (row.setup, row.source, row.assumption)
    assert (other.setup.batch_size, other.source) == (9, row.source)
    assert (other.setup.machine, other.assumption) == (row.setup.machine, "more")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("gigabytes = 1, gibibytes = 1", "a case has one peak"),
        ("gigabyte = 1", "key 'gigabyte' is unknown; did you mean 'gigabytes'?"),
        ('timed = "no such run"', "must be the label of one timed row, got 'no such run'"),
        (
            'timed = "3B, ZeRO-Offload, bound"',
            "must be the label of one timed row",
        ),  # there are two
        ('scope = "gpu"', "scope must be one of allocated, reserved, device"),
    ],
)
def test_a_case_that_is_not_right_is_refused_with_its_place(row, said, cases):
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        cases(f'{CASE}rows = [{{ label = "a", {row} }}]')
    assert "cases.toml, group, 'a'" in str(caught.value)
