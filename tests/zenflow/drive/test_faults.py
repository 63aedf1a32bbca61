"""Bad folders and failing drives end in an error that says what to do; the checkpoint stays."""

import copy
import errno
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

from tests.models import TINY, TinyStack, closing, weights_of
from tests.zenflow.runs import make, take_steps
from zenflow import CheckpointError, WorkerError, ZenFlowConfig
from zenflow.drive import disk
from zenflow.rule.sizes import SECTOR
from zenflow.surface import assembly, drive

CONFIG = ZenFlowConfig(topk_ratio=0, update_interval=3, queue_depth=2, block_elements=20, **TINY)


def begin(state_dir, *, model=None, config=CONFIG, **settings):
    return make("release", config, model, state_dir=state_dir, host_threads=1, **settings)


@pytest.fixture
def saved(state_dir):
    """Return a run's folder with a checkpoint of step 4, its state and its weights."""
    model, optimizer = begin(state_dir)
    take_steps(model, optimizer, range(4))
    state, weights = copy.deepcopy(optimizer.state_dict()), weights_of(model)
    optimizer.close()
    return state_dir, state, weights


def resumed(saved, **settings):
    folder, state, weights = saved
    model, optimizer = begin(folder, **settings)
    try:
        model.load_state_dict(dict(zip(model.state_dict(), weights, strict=True)))
        optimizer.load_state_dict(state)
    except BaseException:
        optimizer.close()
        raise
    return model, optimizer


def end_of(model, optimizer, steps):
    take_steps(model, optimizer, steps)
    with optimizer.true_weights():
        found = weights_of(model)
    optimizer.close()
    return found


def assert_checkpoint_is_whole(saved):
    """The folder's checkpoint trains on as memory does."""
    model, optimizer = make("release", CONFIG)
    take_steps(model, optimizer, range(4))
    optimizer.state_dict()
    wanted = end_of(model, optimizer, range(4, 9))
    assert all(map(torch.equal, end_of(*resumed(saved), range(4, 9)), wanted))


# ---- folders ------------------------------------------------------------------------------------


def test_a_folder_that_is_missing(state_dir):
    with pytest.raises(ValueError, match="is no folder: make it on a local drive"):
        begin(state_dir / "none")


def test_a_folder_that_cannot_be_written(state_dir, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    with pytest.raises(ValueError, match="can't be written to"):
        begin(state_dir)


def test_a_folder_in_memory():
    if disk.file_system(Path("/dev/shm")) != "tmpfs":
        pytest.skip("/dev/shm is no tmpfs here")
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as folder,
        pytest.raises(ValueError, match="is in memory"),
    ):
        begin(folder)


def test_a_drive_that_is_full(state_dir, monkeypatch):
    monkeypatch.setattr(disk, "free_bytes", lambda _: 1000)
    with pytest.raises(ValueError, match=r"has 1 kB free, and the states take .* kB: two places"):
        begin(state_dir)
    assert not (state_dir / "states.bin").exists()


def test_a_drive_whose_room_goes_at_the_last_moment(state_dir, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk, "allocate", full)
    with pytest.raises(ValueError, match="No space left"):
        begin(state_dir)
    assert not (state_dir / "states.bin").exists()
    monkeypatch.undo()
    begin(state_dir)[1].close()  # the folder is free again


def test_a_file_system_without_direct_access(state_dir, monkeypatch, caplog):
    opened = os.open

    def refusing(path, flags, *args, **kwargs):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refusing)
    model, optimizer = begin(state_dir)
    with closing(optimizer):
        assert "has no direct access" in caplog.text
        take_steps(model, optimizer, range(3))


def test_direct_access_where_the_file_system_has_it(state_dir):
    _, optimizer = begin(state_dir)
    with closing(optimizer):
        try:
            os.close(os.open(state_dir / "probe", os.O_CREAT | os.O_RDWR | os.O_DIRECT))
        except OSError:
            pytest.skip("no direct access here")
        assert optimizer._engine.drive.folder.is_direct


def test_drives_that_are_likely_slow(state_dir, monkeypatch, caplog):
    monkeypatch.setattr(disk, "file_system", lambda _: "nfs4")
    begin(state_dir)[1].close()
    assert "is on a network (nfs4)" in caplog.text


OTHERS = {
    "2 parameters there, 4 here|parameters there": {"model": lambda: TinyStack(num_layers=5)},
    "host_state is float32 there and compact here": {
        "config": ZenFlowConfig(
            topk_ratio=0, update_interval=3, queue_depth=2, block_elements=20,
            host_state="compact", **TINY,
        )
    },
    "cut of the states": {
        "config": ZenFlowConfig(topk_ratio=0, update_interval=1, block_elements=400, **TINY)
    },
}  # fmt: skip


@pytest.mark.parametrize("text", OTHERS)
def test_a_folder_of_another_run(text, saved):
    settings = dict(OTHERS[text])
    if "model" in settings:
        settings["model"] = settings["model"]()
    with pytest.raises(ValueError, match=f"another run, at step 4: .*({text})"):
        begin(saved[0], **settings)
    assert_checkpoint_is_whole(saved)


def test_a_file_of_somebody_else(state_dir):
    (state_dir / "states.bin").write_text("a film")
    with pytest.raises(ValueError, match="without a manifest"):
        begin(state_dir)
    assert (state_dir / "states.bin").read_text() == "a film"


def test_a_run_that_ended_before_its_first_checkpoint_leaves_its_folder_to_others(state_dir):
    model, optimizer = begin(state_dir)
    take_steps(model, optimizer, range(2))
    optimizer.close()
    model, optimizer = begin(state_dir, model=TinyStack(num_layers=2))
    with closing(optimizer):
        take_steps(model, optimizer, range(2))


HOLDER = """
import fcntl, os, sys
file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.lockf(file, fcntl.LOCK_EX)
os.write(file, str(os.getpid()).encode())
print(os.getpid(), flush=True)
sys.stdin.read()
"""


def test_two_optimizers_in_one_folder(state_dir):
    _, optimizer = begin(state_dir)
    with closing(optimizer), pytest.raises(ValueError, match="another optimizer of this process"):
        begin(state_dir)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, state_dir / "lock"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as other:  # fmt: skip
        number = other.stdout.readline().strip()
        with pytest.raises(ValueError, match=f"in use by process {number}"):
            begin(state_dir)
        other.stdin.close()
    begin(state_dir)[1].close()


# ---- settings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"topk_ratio": 0.1}, "lets columns change owner"),
        ({"topk_ratio": 0.0, "update_rule": "published"}, "passes over all states"),
    ],
    ids=["k", "rule"],
)
def test_settings_that_a_drive_does_not_take(changes, text, state_dir):
    with pytest.raises(ValueError, match=text):
        begin(state_dir, config=ZenFlowConfig(**{**TINY, **changes}))
    assert not list(state_dir.iterdir())


def test_several_processes(state_dir, monkeypatch):
    monkeypatch.setattr(drive, "num_ranks", lambda: 2)
    with pytest.raises(ValueError, match="several processes train together"):
        begin(state_dir)


@pytest.mark.parametrize("tbw", [0, -1, 600])
def test_a_warranty_without_a_drive(tbw):
    with pytest.raises(ValueError, match="drive_tbw"):
        begin(None, drive_tbw=tbw)


def test_a_model_whose_states_all_stay_on_the_device(state_dir, caplog):
    model, optimizer = begin(state_dir, config=ZenFlowConfig(topk_ratio=1))
    with closing(optimizer):
        take_steps(model, optimizer, range(2))
        optimizer.load_state_dict(optimizer.state_dict())
        take_steps(model, optimizer, range(2))
    assert "nothing goes there" in caplog.text


# ---- checkpoints --------------------------------------------------------------------------------


def test_training_anew_where_a_checkpoint_is(saved):
    """Neither a step nor a state of another place overwrites a checkpoint."""
    folder, state, _ = saved
    model, optimizer = make("release", CONFIG)
    take_steps(model, optimizer, range(1))
    other = copy.deepcopy(optimizer.state_dict())
    optimizer.close()
    plain = torch.optim.AdamW(model.parameters())
    plain.load_state_dict(plain.state_dict())
    model, optimizer = begin(folder)
    for call in (
        lambda: take_steps(model, optimizer, range(1)),
        optimizer.eval,
        lambda: optimizer.load_state_dict(other),
        lambda: optimizer.load_state_dict(plain.state_dict()),
        optimizer.adopt_weights,
    ):
        with pytest.raises(CheckpointError, match="has the checkpoint of step 4"):
            call()
        optimizer.zero_grad()
    optimizer.load_state_dict(state)
    optimizer.close()
    assert_checkpoint_is_whole(saved)


def test_a_state_that_refers_to_a_drive_needs_one(saved):
    _, optimizer = make("release", CONFIG)
    with closing(optimizer), pytest.raises(CheckpointError, match="with that state_dir"):
        optimizer.load_state_dict(saved[1])


def test_a_state_that_refers_to_another_run(saved, tmp_path):
    (saved[0] / "other").mkdir()
    _, optimizer = begin(saved[0] / "other")
    with closing(optimizer), pytest.raises(CheckpointError, match="of another run"):
        optimizer.load_state_dict(saved[1])


def test_only_the_last_checkpoint_can_be_loaded(saved):
    model, optimizer = resumed(saved)
    optimizer.load_state_dict(saved[1])  # nothing has been written since
    take_steps(model, optimizer, range(4, 6))
    newer = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved[1])  # until the next write both are whole
    optimizer.load_state_dict(newer)
    take_steps(model, optimizer, range(6, 10))
    optimizer.synchronize()
    with pytest.raises(CheckpointError, match=r"checkpoint 2 \(step 6\), and the state refers to"):
        optimizer.load_state_dict(saved[1])
    optimizer.close()


@pytest.mark.parametrize("anew", [False, True])
def test_a_state_is_loaded_while_writes_are_under_way(anew, state_dir, monkeypatch):
    """A write that ends behind the load does not bring back what the load replaced."""
    write = disk.write

    def slow(*args):
        time.sleep(0.02)
        write(*args)

    model, optimizer = begin(state_dir)
    state, weights = copy.deepcopy(optimizer.state_dict()), weights_of(model)
    if not anew:
        take_steps(model, optimizer, range(4))
        state, weights = copy.deepcopy(optimizer.state_dict()), weights_of(model)
    first = 0 if anew else 4
    monkeypatch.setattr(disk, "write", slow)
    found = []
    for _ in range(2):
        take_steps(model, optimizer, range(first, first + 3))
        optimizer.synchronize()
        model.load_state_dict(dict(zip(model.state_dict(), weights, strict=True)))
        optimizer.load_state_dict(state)
        take_steps(model, optimizer, range(first, first + 5))
        with optimizer.true_weights():
            found.append(weights_of(model))
        model.load_state_dict(dict(zip(model.state_dict(), weights, strict=True)))
        optimizer.load_state_dict(state)
    optimizer.close()
    model, optimizer = make("release", CONFIG)
    take_steps(model, optimizer, range(first))
    optimizer.state_dict()
    wanted = end_of(model, optimizer, range(first, first + 5))
    for weights in found:
        assert all(map(torch.equal, weights, wanted))


def test_a_second_checkpoint_without_a_step_is_the_first_one(saved):
    _, optimizer = resumed(saved)
    with closing(optimizer):
        assert optimizer.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
        assert len(optimizer._engine.drive.folder.manifest.generations) == 1


def damage(path, place, mode="r+b"):
    with open(path, mode) as file:
        file.seek(place)
        byte = file.read(1)
        file.seek(place)
        file.write(bytes([byte[0] ^ 1]))


def test_an_extent_with_other_bytes(saved):
    """A bit that has changed is found before anything of the running state is replaced."""
    folder = saved[0]
    _, optimizer = begin(folder)
    last = optimizer._engine.drive.folder.manifest.newest
    extent = optimizer._engine.drive.extents[-1]
    optimizer.close()
    damage(folder / "states.bin", extent.place(int(last.places[-1])) + 5)
    with pytest.raises(CheckpointError, match=rf"extent {extent.index} of .*states.bin has other"):
        resumed(saved)
    damage(folder / "states.bin", extent.place(int(last.places[-1])) + 5)
    assert_checkpoint_is_whole(saved)


def test_a_file_that_was_cut_off(saved):
    os.truncate(saved[0] / "states.bin", 5000)
    with pytest.raises(CheckpointError, match=r"states\.bin has 5,000 bytes"):
        begin(saved[0])


@pytest.mark.parametrize("place", [3, 60, 400])
def test_a_manifest_that_is_damaged(place, saved):
    damage(saved[0] / "manifest.json", place)
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        begin(saved[0])


# ---- a drive that fails in mid-run --------------------------------------------------------------


def failing(monkeypatch, name, number):
    old, count = getattr(disk, name), [0]

    def call(*args):
        count[0] += 1
        if count[0] >= number:
            raise OSError(errno.EIO, "Input/output error")
        old(*args)

    monkeypatch.setattr(disk, name, call)


@pytest.mark.parametrize("number", [1, 2, 9])
@pytest.mark.parametrize("name", ["read", "write"])
def test_a_drive_that_fails(name, number, saved, monkeypatch):
    model, optimizer = resumed(saved)
    failing(monkeypatch, name, number)
    with pytest.raises(WorkerError, match=r"the checkpoint of step 4 in .* is whole"):
        end_of(model, optimizer, range(4, 12))
    with pytest.raises(WorkerError):
        optimizer.state_dict()
    optimizer.close()
    monkeypatch.undo()
    assert_checkpoint_is_whole(saved)


def test_reads_and_writes_that_stop_half_way_go_on(state_dir, monkeypatch):
    for name in ("preadv", "pwritev"):
        old = getattr(os, name)

        def short(file, buffers, offset, old=old):
            return old(file, [buffers[0][:SECTOR]], offset)

        monkeypatch.setattr(os, name, short)
    monkeypatch.setattr("zenflow.drive.extents.EXTENT_ELEMENTS", 2000)
    config = ZenFlowConfig(topk_ratio=0, update_interval=1, **TINY)
    ends = []
    for folder in (None, state_dir):
        model = TinyStack(num_layers=2, width=40)
        ends.append(end_of(*begin(folder, model=model, config=config), range(4)))
    assert all(map(torch.equal, *ends))


@pytest.mark.parametrize("name", ["sync_data", "write_synced", "rename", "sync_folder"])
def test_a_checkpoint_that_cannot_be_made(name, saved, monkeypatch):
    model, optimizer = resumed(saved)
    take_steps(model, optimizer, range(4, 7))
    optimizer.synchronize()
    optimizer._engine.drive.flush()
    failing(monkeypatch, name, 1)
    with pytest.raises(CheckpointError, match=r"Input/output error.*the checkpoint of step 4"):
        optimizer.state_dict()
    monkeypatch.undo()
    take_steps(model, optimizer, range(7, 10))  # writes to no place of the checkpoint
    optimizer.close()
    assert_checkpoint_is_whole(saved)


# ---- wear ---------------------------------------------------------------------------------------


def test_the_wear_is_said_once_and_reported(state_dir, caplog):
    model, optimizer = begin(state_dir, drive_tbw=1e-6)
    with closing(optimizer):
        take_steps(model, optimizer, range(6))
        extents = sum(extent.num_bytes for extent in optimizer._engine.drive.extents)
        # S = 3 and q = 2: two passes in three steps.
        share = 1000 * extents * 2 / 3 / 1e6
        assert caplog.text.count(f"{share:.2%} of the drive's warranted 1e-06 TB") == 1
        optimizer.synchronize()
        assert optimizer.report.drive_worn >= extents / 1e6
        assert optimizer.memory.drive_bytes == 2 * extents


def test_the_plan_has_buffers_in_place_of_states(state_dir):
    plans = []
    for folder in (None, state_dir):
        _, optimizer = begin(folder)
        plans.append(optimizer.memory)
        optimizer.close()
    memory, drive = plans
    states = 12 * memory.split_params
    assert memory.host_bytes - drive.host_bytes == states - drive.buffer_bytes
    assert (memory.buffer_bytes, memory.drive_bytes) == (0, 0)
    assert drive.drive_bytes >= 2 * states
    assert "two places for each state" in str(drive)


def test_wear_counts_earlier_processes(saved):
    _, optimizer = begin(saved[0], drive_tbw=1)
    with closing(optimizer):
        assert optimizer._engine.drive.folder.all_written_bytes > 0


def test_folders_are_given_back(saved, monkeypatch):
    """An optimizer that is collected, or could not be made, holds no folder."""
    model, optimizer = begin(saved[0])
    del optimizer, model
    begin(saved[0])[1].close()

    def no_memory(*_, **__):
        raise MemoryError

    monkeypatch.setattr(assembly, "Engine", no_memory)
    with pytest.raises(MemoryError):
        begin(saved[0])
    monkeypatch.undo()
    begin(saved[0])[1].close()
