"""Ranks of a machine have disjoint, equal shares of its processors, near their GPUs first."""

import os
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from zenflow.host.fair_share import cpus_of_rank, gpu_node, numa_nodes


@st.composite
def machines(draw):
    """A machine's processors by node, and the node that each rank's GPU is on."""
    sizes = draw(st.lists(st.integers(1, 40), min_size=1, max_size=8))
    cpus = draw(st.permutations(range(sum(sizes))))
    nodes, first = {}, 0
    for node, size in enumerate(sizes):
        nodes[2 * node] = sorted(cpus[first : first + size])
        first += size
    place = st.sampled_from([None, *nodes, 99])
    return nodes, draw(st.lists(place, min_size=1, max_size=16))


@given(machines())
def test_shares_are_disjoint_equal_and_all_there_is(machine):
    nodes, near = machine
    shares = [cpus_of_rank(nodes, rank, near) for rank in range(len(near))]
    taken = [cpu for share in shares for cpu in share]
    assert sorted(taken) == sorted(cpu for cpus in nodes.values() for cpu in cpus)
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1


@given(machines())
def test_a_rank_leaves_its_own_node_only_where_that_is_used_up(machine):
    nodes, near = machine
    shares = [set(cpus_of_rank(nodes, rank, near)) for rank in range(len(near))]
    for share, own in zip(shares, near, strict=True):
        if own not in nodes or share <= set(nodes[own]):
            continue
        at_home = [s for s, place in zip(shares, near, strict=True) if place == own]
        assert set(nodes[own]) <= set().union(*at_home)


@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 4))
def test_ranks_of_a_node_share_it_evenly(size, ranks, num_nodes):
    nodes = {n: list(range(n * size * ranks, (n + 1) * size * ranks)) for n in range(num_nodes)}
    near = [node for node in nodes for _ in range(ranks)]
    for rank, node in enumerate(near):
        share = cpus_of_rank(nodes, rank, near)
        assert len(share) == size
        assert set(share) <= set(nodes[node])


def write(root, path, text):
    place = root / path
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text + "\n")


def test_the_machine_is_read_as_linux_tells_it(tmp_path):
    system = "sys/devices/system"
    write(tmp_path, f"{system}/node/node0/cpulist", "0-1,4-5")
    write(tmp_path, f"{system}/node/node1/cpulist", "2-3,6-7")
    for cpu in range(8):
        siblings = f"{cpu % 4},{cpu % 4 + 4}"
        write(tmp_path, f"{system}/cpu/cpu{cpu}/topology/thread_siblings_list", siblings)
    assert numa_nodes(range(8), tmp_path) == {0: [0, 4, 1, 5], 1: [2, 6, 3, 7]}
    assert numa_nodes({1, 4, 5}, tmp_path) == {0: [4, 1, 5]}
    assert numa_nodes({0, 9}, tmp_path) == {0: [0, 9]}  # the tree lacks one
    assert numa_nodes({0, 3}, tmp_path / "absent") == {0: [0, 3]}
    write(tmp_path, "sys/bus/pci/devices/0000:3b:00.0/numa_node", "1")
    write(tmp_path, "sys/bus/pci/devices/0000:5e:00.0/numa_node", "-1")
    assert gpu_node("0000:3B:00.0", tmp_path) == 1
    assert gpu_node("0000:5e:00.0", tmp_path) is None
    assert gpu_node("0000:00:00.0", tmp_path) is None


def test_every_thread_of_a_process_is_bound():
    cpu = min(os.sched_getaffinity(0))
    program = (
        "import os, threading\n"
        "from zenflow.host.fair_share import bind_process\n"
        "found, go = [], threading.Event()\n"
        "def look():\n    go.wait()\n    found.append(os.sched_getaffinity(0))\n"
        "early = threading.Thread(target=look)\n"
        "early.start()\n"
        f"assert bind_process([{cpu}])\n"
        "go.set()\nearly.join()\nlook()\n"
        f"assert found == [{{{cpu}}}] * 2, found\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
