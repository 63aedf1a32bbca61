"""Columns that change owner: bytes of each way, and what the host waits for."""

from unittest import mock

import pytest
import torch

from tests.models import TINY, TinyStack, assert_equal, closing, weights_of
from tests.zenflow.races.harness import Training, checked
from zenflow import ZenFlowAdamW, ZenFlowConfig
from zenflow.columns import handover, host_update
from zenflow.host.kernel import active_kernel
from zenflow.rule.sizes import COLUMN_STATE_BYTES
from zenflow.step.host import schedule

READS = 3
"""Reads of scores and indices, of all blocks together."""


class Link:
    """A device, and the messages that it carries in a handover."""

    def __init__(self, device):
        self.device, self.sent, self.fetched = device, [], []

    def __getattr__(self, name):
        return getattr(self.device, name)

    def send(self, host):
        self.sent.append((host.dtype, host.nbytes))
        return self.device.send(host)

    def to_host(self, values):
        self.fetched.append((values.dtype, values.nbytes))
        return self.device.to_host(values)


def selecting(moving_bytes, steps=4):
    """Return each handover's elements that move, groups, messages and waits; and the weights."""
    found = []
    with checked() as checker:

        def watched(blocks, *rest):
            link, waits = Link(rest[-1]), len(checker.waits)
            active = hand_over(blocks, *rest[:-1], link)
            moved = [int((active[b.index] == 0).sum()) * b.split.num_rows for b in blocks]
            num_groups = sum(map(bool, moved)) if moving_bytes == 1 else int(any(moved))
            found.append((sum(moved), num_groups, link, len(checker.waits) - waits))
            return active

        hand_over = handover.hand_over
        with (
            mock.patch.object(handover, "MOVING_BYTES", moving_bytes),
            mock.patch.object(schedule, "hand_over", watched),
        ):
            training = Training(checker, "release", {"update_interval": 2}, model=TinyStack(4))
            with closing(training.optimizer):
                for step in range(1, steps + 1):
                    training.step(step)
                training.optimizer.eval()
                weights = weights_of(training.model)
        assert checker.races == []
    return found, weights


def test_a_handover_sends_the_state_of_its_columns_once_each_way_and_waits_for_no_group():
    one_by_one, weights = selecting(1)
    together, same_weights = selecting(1 << 26)
    assert_equal(weights, same_weights)
    assert max(num_groups for _, num_groups, _, _ in one_by_one) > 3
    for num_elements, num_groups, link, num_waits in [*one_by_one, *together]:
        for messages in (link.sent, link.fetched):
            state = [size for dtype, size in messages if dtype == torch.float32]
            assert sum(state) == COLUMN_STATE_BYTES * num_elements
            assert len(state) == len(messages) - len(state) == num_groups
        assert num_waits == READS


@pytest.mark.skipif(active_kernel() != "c", reason="needs the C kernel")
@pytest.mark.parametrize("rule", ["exact", "published"])
def test_the_hosts_threads_share_the_steps_of_columns_that_leave(rule, monkeypatch):
    """The training thread, for which the device waits, takes none alone."""
    monkeypatch.delattr(host_update.kernel, "run")
    config = ZenFlowConfig(topk_ratio=0.3, update_interval=2, update_rule=rule, **TINY)
    model = TinyStack(num_layers=3)
    with closing(ZenFlowAdamW(model.parameters(), config=config, host_threads=2)) as optimizer:
        before = [split.important_columns.clone() for split in optimizer._engine.layout.splits]
        for step in range(3):
            model.loss(step).backward()
            optimizer.step()
        after = [split.important_columns for split in optimizer._engine.layout.splits]
        assert any(not torch.equal(*pair) for pair in zip(before, after, strict=True))
