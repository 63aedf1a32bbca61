import pytest
import torch

from experiments.training.parts.data import batches as data
from experiments.training.parts.data.batches import (
    LabelledBatches,
    TokenWindows,
    make_batches,
    read_source,
)
from experiments.training.parts.data.texts import (
    Documents,
    is_held_out,
    path_documents,
    stdlib_documents,
    stdlib_files,
    tsv_texts,
)
from experiments.training.parts.data.tokens import PADDING, SEPARATOR, ByteTokenizer
from experiments.training.settings.training import TrainSettings
from zenflow.errors import ConfigError


def test_standard_library_is_megabytes_without_tests_or_installed_packages():
    files = stdlib_files()
    assert sum(path.stat().st_size for path in files) > 5e6
    folders = {part for path in files for part in path.parts}
    assert not folders & {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
    assert files == sorted(files, key=lambda path: path.as_posix())


def test_held_out_files_are_a_few_percent_disjoint_and_the_same_every_time():
    first, second = stdlib_documents(), stdlib_documents()
    assert first == second
    assert not set(first.train) & set(first.held_out)
    share = len(first.held_out) / (len(first.train) + len(first.held_out))
    assert 0.02 < share < 0.1


def test_held_out_depends_on_the_name_alone():
    # Fixed values: a change of the hash would silently train on yesterday's evaluation data.
    names = ["abc.py", "json/decoder.py", "typing.py", "ast.py", "os.py"]
    assert [is_held_out(name, 0.5) for name in names] == [False, True, False, False, False]
    assert not any(is_held_out(name, 0.0) for name in names)


def test_directory_is_split_by_file_whatever_the_listing_order(tmp_path):
    for number in range(60):
        (tmp_path / f"{number}.txt").write_text(f"text {number}")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    documents = path_documents(tmp_path)
    expected = {f"text {n}" for n in range(60) if is_held_out(f"{n}.txt")}
    assert set(documents.held_out) == expected
    assert len(documents.train) + len(documents.held_out) == 60


def test_single_file_is_held_out_by_its_end(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("a" * 950 + "b" * 50)
    documents = path_documents(path)
    assert documents.train == ("a" * 950,)
    assert documents.held_out == ("b" * 50,)


@pytest.mark.parametrize("names", [["a.txt"], ["a.txt", "b.txt", "c.txt"]])
def test_few_files_hold_out_the_end_of_the_largest_and_say_so(tmp_path, names):
    for number, name in enumerate(names, start=1):
        (tmp_path / name).write_text(f"{number}" * 100 * number)
    documents = path_documents(tmp_path)
    (held_out,) = documents.held_out
    total = sum(100 * number for number in range(1, len(names) + 1))
    assert held_out == str(len(names)) * (total // 20)
    assert sum(map(len, documents.train)) + len(held_out) == total
    assert names[-1] in documents.notes[0]


def test_a_tiny_largest_file_keeps_half_of_itself(tmp_path):
    names = [name for number in range(90) if not is_held_out(name := f"{number}.txt")]
    for name in names:
        (tmp_path / name).write_text("abcd")
    documents = path_documents(tmp_path)
    assert documents.held_out == ("cd",)
    assert documents.train.count("ab") == 1


def test_texts_to_evaluate_on_leave_the_data_whole(tmp_path):
    folder, other = tmp_path / "data", tmp_path / "other.txt"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number}.txt").write_text(f"text {number}")
    other.write_text("elsewhere")
    source = read_source(TrainSettings(data=str(folder), eval_data=str(other)))
    assert sorted(source.train) == sorted(f"text {number}" for number in range(60))
    assert source.held_out == ("elsewhere",)
    single = read_source(TrainSettings(data=str(folder / "1.txt"), eval_data=str(other)))
    assert (single.train, single.held_out) == (("text 1",), ("elsewhere",))


def test_the_standard_library_can_be_evaluated_on_other_texts(tmp_path):
    (tmp_path / "a.txt").write_text("elsewhere")
    source = read_source(TrainSettings(eval_data=str(tmp_path / "a.txt")))
    assert source.held_out == ("elsewhere",)
    assert source.train == stdlib_documents().train


def test_labelled_texts_to_evaluate_on_share_the_classes(tmp_path):
    (tmp_path / "a.tsv").write_text("good\tyes\nbad\tno\n")
    (tmp_path / "b.tsv").write_text("fine\tyes\n")
    settings = TrainSettings(data=str(tmp_path / "a.tsv"), eval_data=str(tmp_path / "b.tsv"))
    source = read_source(settings)
    assert source.train == (("good", 1), ("bad", 0))
    assert source.held_out == (("fine", 1),)


def test_bytes_that_are_not_utf8_are_counted(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"x" * 100 + b"\xff" + b"y" * 100 + b"\xfe\xff")
    documents = path_documents(tmp_path / "a.txt")
    assert "".join((*documents.train, *documents.held_out)).count("\ufffd") == 3
    assert "3 in all" in documents.notes[0]
    assert "byte 100 of" in documents.notes[0]


def test_a_replacement_character_of_the_texts_own_is_none(tmp_path):
    (tmp_path / "a.txt").write_text("x\ufffd" * 100, encoding="utf-8")
    assert path_documents(tmp_path / "a.txt").notes == ()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"text\0more", "byte 4 is 0"),
        ("wide".encode("utf-16"), "UTF-16"),
        (bytes(range(128, 256)) * 4, "not text in UTF-8.*byte 0"),
    ],
)
def test_a_binary_file_is_refused(tmp_path, content, words):
    (tmp_path / "a.txt").write_bytes(content)
    for path in (tmp_path, tmp_path / "a.txt"):
        with pytest.raises(ConfigError, match=words):
            path_documents(path)


def test_line_ends_of_other_systems_are_read_as_one(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"a\r\nb\rc\n" * 20)
    assert "".join(path_documents(tmp_path / "a.txt").train).startswith("a\nb\nc\n")


def test_an_empty_file_is_called_empty(tmp_path):
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(ConfigError, match=r"a\.txt must hold text, but is empty"):
        path_documents(tmp_path / "a.txt")
    with pytest.raises(ConfigError, match="none in 1 text files"):
        path_documents(tmp_path)


def test_empty_directory_is_refused_with_the_suffixes_that_count(tmp_path):
    with pytest.raises(ConfigError, match=r"must hold text.*\.txt"):
        path_documents(tmp_path)


def test_tsv_takes_text_before_the_last_tab_and_maps_labels_in_order(tmp_path):
    (tmp_path / "train.tsv").write_text("text\tlabel\nx\ty\t10\ngood\t2\nbad\t10\n")
    (tmp_path / "dev.tsv").write_text("fine\t2\n")
    texts = tsv_texts(tmp_path)
    assert texts.classes == ("2", "10")
    assert texts.train == (("x\ty", 1), ("good", 0), ("bad", 1))
    assert texts.held_out == (("fine", 0),)


def test_single_tsv_holds_out_texts_by_hash_so_duplicates_stay_together(tmp_path):
    lines = [f"sentence {n % 100}\t{n % 2}\n" for n in range(400)]
    (tmp_path / "a.tsv").write_text("".join(lines))
    texts = tsv_texts(tmp_path / "a.tsv")
    assert texts.held_out
    assert not {text for text, _ in texts.train} & {text for text, _ in texts.held_out}


def test_tsv_line_without_tab_is_named(tmp_path):
    (tmp_path / "a.tsv").write_text("good\t1\nno label here\n")
    with pytest.raises(ConfigError, match="line 2"):
        tsv_texts(tmp_path / "a.tsv")


def test_one_class_is_not_a_classification(tmp_path):
    (tmp_path / "a.tsv").write_text("good\t1\nfine\t1\n")
    with pytest.raises(ConfigError, match="two classes"):
        tsv_texts(tmp_path / "a.tsv")


def test_byte_tokens_are_utf8_with_a_separator_behind_each_text():
    stream = ByteTokenizer().stream(["ab", "é"])
    assert stream.tolist() == [97, 98, SEPARATOR, 0xC3, 0xA9, SEPARATOR]


def test_windows_of_an_epoch_cover_every_token_once_and_targets_follow_inputs():
    tokens = torch.arange(101, dtype=torch.int32)
    windows = TokenWindows(tokens, batch_size=2, sequence=10, seed=1)
    batches = [windows.batch(index) for index in range(windows.per_epoch)]
    inputs = torch.cat([batch.inputs for batch in batches])
    targets = torch.cat([batch.targets for batch in batches])
    assert sorted(inputs.flatten().tolist()) == list(range(100))
    assert torch.equal(targets, inputs + 1)


def test_batch_is_a_pure_function_of_seed_and_index():
    tokens = torch.arange(1001, dtype=torch.int32)
    windows = TokenWindows(tokens, batch_size=3, sequence=10, seed=5)
    again = TokenWindows(tokens, batch_size=3, sequence=10, seed=5)
    other = TokenWindows(tokens, batch_size=3, sequence=10, seed=6)
    later = again.batch(70)  # in a later epoch, and before earlier ones were asked for
    assert torch.equal(windows.batch(2).inputs, again.batch(2).inputs)
    assert torch.equal(windows.batch(70).inputs, later.inputs)
    assert not torch.equal(windows.batch(2).inputs, other.batch(2).inputs)


def test_epochs_are_shuffled_differently():
    tokens = torch.arange(1001, dtype=torch.int32)
    windows = TokenWindows(tokens, batch_size=100, sequence=10, seed=5)
    assert not torch.equal(windows.batch(0).inputs, windows.batch(1).inputs)


def test_text_shorter_than_a_sequence_is_refused():
    with pytest.raises(ConfigError, match="at least 11 tokens"):
        TokenWindows(torch.arange(10).int(), batch_size=1, sequence=10, seed=0)


def test_labelled_rows_are_cut_padded_and_masked():
    rows = [("abcdef", 1), ("g", 0)]
    batches = LabelledBatches(rows, ByteTokenizer(), batch_size=8, sequence=4, seed=0)
    batch = batches.batch(0)
    by_label = dict(zip(batch.targets.tolist(), batch.inputs.tolist(), strict=True))
    assert by_label == {1: list(b"abcd"), 0: [ord("g"), PADDING, PADDING, PADDING]}
    assert batch.num_tokens == 5


def test_evaluation_batches_do_not_depend_on_the_runs_seed(tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"{n} " for n in range(2000)))
    made = []
    for seed in (1, 2):
        settings = TrainSettings(data=str(tmp_path / "a.txt"), sequence=8, seed=seed)
        made.append(make_batches(read_source(settings), ByteTokenizer(), settings))
    first, second = made
    assert torch.equal(first.held_out.batch(0).inputs, second.held_out.batch(0).inputs)
    assert not torch.equal(first.train.batch(0).inputs, second.train.batch(0).inputs)


def test_default_data_has_no_labels():
    with pytest.raises(ConfigError, match="no labels"):
        read_source(TrainSettings(task="classification"))


def test_a_path_that_is_not_there_is_never_looked_for_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "hub_dataset", lambda *_, **__: pytest.fail("asked the hub"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_texts").mkdir()
    (tmp_path / "corpus.txt").write_text("")
    for name, words in {
        "corpsu.txt": "did you mean corpus.txt",
        "nothing/here/at/all": "no directory",
        "./glue": "has no glue",
        "my_texts/a": "has no a",
        str(tmp_path / "my_text"): "did you mean .*my_texts",
        "my text": "my_texts",
    }.items():
        with pytest.raises(ConfigError, match=words):
            read_source(TrainSettings(data=name))


@pytest.mark.parametrize("name", ["glue:sst2", "teknium/OpenHermes-2.5", "imdb", "a/b.v2"])
def test_names_of_the_hub_are_looked_for_there(monkeypatch, name):
    found = Documents(name=name, train=("a",), held_out=("b",))
    monkeypatch.setattr(data, "hub_dataset", lambda *_, **__: found)
    assert read_source(TrainSettings(data=name)) is found


def test_saved_dataset_is_read_with_its_class_names(tmp_path):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {"sentence": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])}
    )
    rows = {"sentence": ["a", "b", "c"], "label": [0, 1, 1]}
    split = datasets.Dataset.from_dict(rows, features=features)
    datasets.DatasetDict({"train": split, "validation": split}).save_to_disk(tmp_path / "set")
    source = read_source(TrainSettings(data=str(tmp_path / "set")))
    assert source.classes == ("no", "yes")
    assert source.train == (("a", 0), ("b", 1), ("c", 1))
    with pytest.raises(ConfigError, match="--text-column"):
        read_source(TrainSettings(data=str(tmp_path / "set"), text_column="body"))
