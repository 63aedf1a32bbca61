"""SST-2's sentences and their batches: strict reading, no leakage, each row once an epoch."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evidence.studies.sst2.data import cut, read_folder, without_leakage
from evidence.studies.sst2.run import POOL_BATCHES, PooledBatches, TestBatches
from experiments.training.parts.data.tokens import ByteTokenizer
from zenflow.errors import ConfigError

GOOD = "a fine film\t1\na dull film\t0\nwarm and sharp\t1\nlong and lame\t0\n"
OTHER = "quite good\t1\nquite bad\t0\nso good\t1\nso bad\t0\n"


def folder_of(path, train=GOOD, test=OTHER):
    (path / "train.tsv").write_bytes(train if isinstance(train, bytes) else train.encode())
    (path / "test.tsv").write_text(test)
    return path


def rows_of(lengths):
    return [("x" * length + str(index), index % 2) for index, length in enumerate(lengths)]


def pooled(rows, seed=0, batch_size=4):
    return PooledBatches(rows, ByteTokenizer(), batch_size=batch_size, sequence=64, seed=seed)


def test_lines_are_sentences_and_labels_with_or_without_a_header(tmp_path):
    found = read_folder(folder_of(tmp_path, "sentence\tlabel\r\n" + GOOD.rstrip("\n")))
    assert found.train[0] == ("a fine film", 1)
    assert (len(found.train), len(found.test), found.num_dropped) == (4, 4, 0)


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        (b"no label", "has 0 tabs"),
        (b"", "has 0 tabs"),
        (b"a\tb\t1", "has 2 tabs"),
        (b" \t1", "has no sentence"),
        (b"good\t2", "has the label '2'"),
        (b"good\tlabel", "has the label 'label'"),
        (b"caf\xe9\t1", "is not UTF-8 at byte 3"),
    ],
)
def test_a_malformed_line_is_named_by_its_number_and_what_is_wrong(tmp_path, line, wrong):
    text = b"a fine film\t1\n" + line + b"\na dull film\t0\n"
    with pytest.raises(ConfigError, match=f"line 2 of .*train.tsv {wrong}"):
        read_folder(folder_of(tmp_path, text))


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere does not exist.*--data-dir"):
        read_folder(tmp_path / "nowhere")
    (tmp_path / "train.tsv").write_text(GOOD)
    with pytest.raises(ConfigError, match=r"has no test\.tsv"):
        read_folder(tmp_path)
    with pytest.raises(ConfigError, match="is not a directory"):
        read_folder(tmp_path / "train.tsv")


def test_a_part_with_one_class_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="test sentences"):
        read_folder(folder_of(tmp_path, test="a\t1\nb\t1\nc\t1\nd\t1\n"))


def test_no_training_sentence_is_in_the_test_or_comes_twice():
    test = [("So Good", 1), ("so bad", 0), ("one", 1), ("two", 0)]
    train = [("so  good", 1), ("a", 0), ("A ", 0), ("b", 1), ("c", 0), ("d", 1)]
    found = without_leakage("made up", train, test)
    assert [text for text, _ in found.train] == ["a", "b", "c", "d"]
    assert found.num_dropped == 2


def test_a_cut_does_not_depend_on_the_files_order_and_a_larger_one_holds_it():
    rows = rows_of(range(1, 41))
    found = without_leakage("made up", rows, rows_of([50] * 8))
    turned = without_leakage("made up", rows[::-1], rows_of([50] * 8))
    small, large = cut(found, 10), cut(turned, 20)
    assert len(small.train) == 10
    assert set(small.train) < set(large.train)
    assert cut(turned, 10).digest() == small.digest() != large.digest()
    assert len(cut(found, 41).train) == 40, "all there are"


@given(st.lists(st.integers(1, 60), min_size=1, max_size=150), st.integers(1, 9))
def test_every_epoch_holds_every_row_once(lengths, batch_size):
    batches = pooled(rows_of(lengths), batch_size=batch_size)
    for epoch in range(2):
        first = epoch * batches.per_epoch
        seen = [i for n in range(first, first + batches.per_epoch) for i in batches.items(n)]
        assert sorted(seen) == list(range(len(lengths)))


def test_batches_are_a_function_of_seed_and_index():
    rows = rows_of([5, 40, 20, 3] * 25)
    one, two = pooled(rows), pooled(rows)
    indices = range(2 * one.per_epoch)
    planned = [one.items(index) for index in indices]
    assert planned == [two.items(index) for index in reversed(indices)][::-1]
    assert planned[: one.per_epoch] != planned[one.per_epoch :]
    assert planned != [pooled(rows, seed=1).items(index) for index in indices]


def test_sentences_of_like_length_share_a_batch_but_not_always_the_same_ones():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, 60, (8 * POOL_BATCHES,), generator=generator).tolist()
    batches = pooled(rows_of(lengths), batch_size=8)
    masks = [batches.batch(index).mask for index in range(batches.per_epoch)]
    padding = 1 - sum(m.sum().item() for m in masks) / sum(m.numel() for m in masks)
    assert padding < 0.1  # a quarter to a half, where lengths are mixed
    sizes = [len(mask[0]) for mask in masks]
    assert sizes != sorted(sizes)


def test_a_batch_is_padded_behind_its_tokens_and_says_where():
    batch = pooled([("ab", 1), ("abcd", 0)], batch_size=2).batch(0)
    assert batch.inputs.shape == (2, 4)
    assert batch.num_tokens == 6
    assert batch.inputs[batch.mask == 0].unique().tolist() == [ByteTokenizer.pad_id]
    short = batch.mask.sum(1).argmin()
    assert batch.targets[short] == 1


def test_the_test_holds_every_sentence_once():
    rows = rows_of([7, 3, 50] * 50)
    batches = TestBatches(rows, ByteTokenizer(), sequence=64)
    seen = {}
    for items, batch in batches:
        seen.update(zip(items, batch.targets.tolist(), strict=True))
    assert seen == {index: label for index, (_, label) in enumerate(rows)}
