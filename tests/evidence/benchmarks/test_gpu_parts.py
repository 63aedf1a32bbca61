"""What a GPU is asked for beside step times: bytes, kernels, memory, losses; here on a CPU."""

import json
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from evidence.benchmarks.gpu import device_pass, finetune, given
from evidence.benchmarks.gpu import setup as gpu_setup
from evidence.benchmarks.gpu.baselines import FusedAdamW, compute_seconds, distinct_gradients
from evidence.benchmarks.gpu.pretrained import Tokens
from evidence.benchmarks.gpu.setup import MODELS, SERIES, Bench
from evidence.benchmarks.gpu.training import Pauses, num_steps, thread_seconds
from evidence.benchmarks.interpreter.played_gpu import played_gpu
from tests.interpreted import needs_triton
from tests.models import assert_equal
from zenflow.device.cuda import CudaDevice
from zenflow.step.gradients.ring import GradientRing

CPU = torch.device("cpu")


def compared():
    shapes = given.SMALL_SHAPES
    return given.compare(shapes, CPU, drawn=1 << 16, threads=1, as_gpu=played_gpu())


def flip(values):
    """Flip the lowest bit of the first number."""
    values.view(-1)[:1].view(torch.int16).bitwise_xor_(1)


def test_both_engines_leave_the_host_the_same_bytes():
    found = compared()
    assert found["wrong_bytes"] == 0
    assert found["sums"]["wrong gradients"] == found["sums"]["wrong uploads"] == 0
    assert found["sums"]["gradients"] == given.STEPS * len(given.SMALL_SHAPES)
    assert found["sums"]["uploads"] > 0


@pytest.mark.parametrize("place", ["ring", "staging", "upload"])
def test_one_wrong_bit_is_noticed_and_its_place_told(place, monkeypatch):
    pack, send, arrived = GradientRing.pack, CudaDevice.transfer, CudaDevice._arrived
    done = []

    def once(values):
        if not done:
            done.append(True)
            flip(values)

    def packed(ring, *rest):
        found = pack(ring, *rest)
        once(found[0][0][0])
        return found

    def sent(device, lane, jobs, after):
        spans = send(device, lane, jobs, after)
        once(jobs[0][1])
        return spans

    def came(*given):
        values = arrived(*given)
        once(values)
        return values

    owner, name, function = {
        "ring": (GradientRing, "pack", packed),
        "staging": (CudaDevice, "transfer", sent),
        "upload": (CudaDevice, "_arrived", came),
    }[place]
    monkeypatch.setattr(owner, name, function)
    found = compared()
    assert done
    sums = found["sums"]
    # What is packed wrong is summed wrong on both sides: only the state that follows shows it.
    assert (found["wrong_bytes"] > 0) == (place != "upload")
    assert (sums["wrong gradients"] > 0) == (place == "staging")
    assert (sums["wrong uploads"] > 0) == (place == "upload")


def test_a_wrong_byte_fails_the_command(monkeypatch, tmp_path):
    monkeypatch.setattr(given, "wrong_bytes", lambda ours, theirs: 1)
    assert given.main(["--smoke", "--out", str(tmp_path)]) == 1
    assert json.loads((tmp_path / "figures.json").read_text())["wrong bytes"] == 1


@pytest.mark.parametrize("kernels", ["torch", pytest.param("triton", marks=needs_triton)])
def test_parts_of_the_pass_do_their_work_where_a_gpu_would(kernels):
    with played_gpu(), torch.no_grad(), device_pass.laid_out((96, 64), CPU, kernels) as matrix:
        parts = device_pass.parts_of(matrix)
        split, grad = matrix.split, matrix.grad
        parts["norms"].run()
        before = split.weight().clone()
        (gathered,), chosen = parts["gather"].run(), grad[:, split.important_columns]
        assert torch.equal(gathered, chosen if kernels == "torch" else chosen.t())
        packed = []
        pack = matrix.ring.pack
        matrix.ring.pack = lambda *given: packed.extend(
            room.clone() for room, _ in pack(*given)[0]
        )
        parts["pack"].run()
        assert torch.equal(torch.cat(packed), grad.t()[split.deferred_columns])
        assert torch.equal(split.weight(), before)
        parts["factors"].run()
        for name, columns in (
            ("land", split.deferred_columns[: matrix.num_deferred // 4]),
            ("fresh step", split.deferred_columns),
            ("fresh step and pack", split.deferred_columns),
            ("AdamW of columns", split.important_columns),
        ):
            before = split.weight().clone()
            parts[name].run()
            changed = (split.weight() != before).any(0).nonzero().flatten()
            assert set(changed.tolist()) <= set(columns.tolist()), name
            assert len(changed), name
        assert all(work.num_bytes > 0 for work in parts.values())


@needs_triton
def test_two_implementations_of_the_pass_stand_side_by_side():
    with played_gpu():
        rows = device_pass.measure((64, 96), CPU, rate=1e9)
    assert [row["implementation"] for row in rows] == ["torch"] * 8 + ["triton"] * 8
    assert all(row["share_of_copy"] == row["bytes_per_second"] / 1e9 for row in rows)
    assert "pack, triton, 64 x 96, GB/s" in device_pass.shown_figures(rows, (64, 96))


def test_the_pass_leaves_its_record_its_figures_and_a_table(tmp_path):
    assert device_pass.main(["--smoke", "--out", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "record.json").read_text())
    parts = {(row["part"], row["implementation"]) for row in record["rows"]}
    assert len(record["rows"]) == len(parts) * len(device_pass.SMALL_SHAPES)
    assert {"hardware", "versions", "commit"} <= record.keys()
    assert json.loads((tmp_path / "figures.json").read_text())
    assert (tmp_path / "table.txt").is_file()


def bench_of(**changes):
    options = SimpleNamespace(smoke=True)
    cell = gpu_setup.Cell(**{"model": "tiny-grouped", "batch": 2, "sequence": 16, **changes})
    return Bench(cell, options, 60, end=0.0)


def test_a_loss_by_pieces_is_the_whole_loss_with_its_gradients():
    found = []
    for loss_tokens in (None, 12):
        bench = bench_of(loss_tokens=loss_tokens)
        model = bench.model().float()
        loss = bench.loss(model, 0)
        loss.backward()
        found.append([loss.detach(), *(param.grad for param in model.parameters())])
    for whole, pieces in zip(*found, strict=True):
        torch.testing.assert_close(pieces, whole, atol=1e-5, rtol=1e-4)


def test_no_logits_are_kept_where_the_loss_goes_by_pieces():
    kept = []
    for loss_tokens in (None, 12):
        bench, sizes = bench_of(loss_tokens=loss_tokens), []
        model = bench.model()
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor, sizes=sizes: sizes.append(tensor.shape) or tensor, lambda tensor: tensor
        ):
            bench.loss(model, 0)
        vocab = MODELS["tiny-grouped"].vocab_size
        kept.append({shape[0] for shape in sizes if shape[-1:] == (vocab,)})
    width = MODELS["tiny-grouped"].hidden_size
    assert kept[0] - {width} == {2 * 16}
    assert kept[1] - {width} == set()


def test_the_large_cell_is_llama_s_eight_billion_made_in_16_bits():
    (cell,) = SERIES["8b"]
    assert cell.workload().num_params == 8_030_261_248
    assert {param.dtype for param in bench_of().model().parameters()} == {torch.bfloat16}
    assert torch.get_default_dtype() is torch.float32


def test_torch_s_adamw_with_float32_masters_takes_float32_steps():
    torch.manual_seed(0)
    low = nn.Linear(8, 4, bias=False).to(torch.bfloat16)
    exact = nn.Linear(8, 4, bias=False)
    exact.weight.data.copy_(low.weight.data)
    fused = FusedAdamW(low, 1e-2, 1.0, has_masters=True)
    optimizer = torch.optim.AdamW(exact.parameters(), lr=1e-2)
    for number in range(5):
        grad = torch.randn(4, 8, generator=torch.Generator().manual_seed(number)) / 64
        low.weight.grad = grad.to(torch.bfloat16)
        exact.weight.grad = low.weight.grad.float()
        fused.step()
        optimizer.step()
        assert low.weight.grad is None
    torch.testing.assert_close(low.weight, exact.weight.to(torch.bfloat16))


def test_pauses_of_the_garbage_collector_are_noted():
    import gc

    with Pauses() as pauses:
        pauses.seconds.clear()
        gc.collect()
    gc.collect()
    assert pauses.to_dict()["count"] == 1
    assert pauses.to_dict()["longest"] > 0


def test_seconds_of_a_thread_go_by_its_name():
    before = thread_seconds()

    def work():
        while time.thread_time() < 0.1:
            pass
        found.update(thread_seconds())  # a thread that has ended is not told

    found = {}
    worker = threading.Thread(target=work, name="worker-12")
    worker.start()
    worker.join()
    assert found["worker"] >= 0.08 > before.get("worker", 0.0)
    assert found["MainThread"] - before["MainThread"] < 0.08


def test_a_run_s_time_follows_from_its_own_steps():
    options = SimpleNamespace(steps=24, warm_steps=10)
    assert num_steps(4, options) == 10 + 24 + 4 + 8
    assert num_steps(16, options) == 32 + 16 + 16 + 8


def test_fine_tuning_goes_on_bit_for_bit_where_another_process_saved(tmp_path):
    options = finetune.parse(["--smoke", "--out", str(tmp_path)])
    state = tmp_path / "half.pt"
    first = finetune.FineTuning(options, "S 4", 0)
    whole = first.run(0, state, tmp_path / "whole.json")
    first.optimizer.close()
    second = finetune.FineTuning(options, "S 4", 0)
    second.load(state)
    rest = second.run(options.steps // 2, None, tmp_path / "rest.json")
    second.optimizer.close()
    assert rest["weights"] == whole["weights"]
    assert rest["losses"] == whole["losses"][options.steps // 2 :]
    assert whole["held_out"].keys() == {2, 4, 6, 8}
    reports = {"on_device 0": whole, "S 4 0": whole, "resumed 0": rest}
    strings = json.loads(json.dumps(reports))
    assert finetune.figures_of(strings)["resumed bit for bit"]
    strings["resumed 0"]["weights"] = "other"
    assert not finetune.figures_of(strings)["resumed bit for bit"]


def test_tokens_are_prepared_by_the_model_s_tokenizer(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("one two three " * 400)

    class Words:
        eos_token_id, sep_token_id, bos_token_id, pad_token_id = 9, None, None, None

        def __len__(self):
            return 50_000

        def __call__(self, given, **_):
            return {"input_ids": [[40_000 + len(word) for word in text.split()] for text in given]}

    auto = SimpleNamespace(from_pretrained=lambda *_, **__: Words())
    monkeypatch.setattr("transformers.models.auto.AutoTokenizer", auto)
    model, file = tmp_path / "model", tmp_path / "tokens.npz"
    model.mkdir()
    arguments = ["--prepare", str(file), "--model", str(model), "--data", str(texts)]
    assert finetune.main(arguments) == 0
    tokens = Tokens(file, batch=2, sequence=3, seed=1)
    batch = tokens.train(0)
    assert batch.shape == (2, 4)
    assert set(batch.flatten().tolist()) <= {9, 40_003, 40_005}
    assert_equal(tokens.train(0), batch)
    assert not torch.equal(tokens.train(1), tokens.train(2))
    assert all(held.shape == (2, 4) for held in tokens.held_out())


@pytest.mark.parametrize("repeats", [True, False])
def test_gradients_that_do_not_repeat_are_counted(repeats, monkeypatch):
    """One bit of one element, in the second of six computations."""
    bench, calls = bench_of(), []
    loss_of = Bench.loss

    def loss(self, model, step):
        calls.append(step)
        if not repeats and len(calls) == 2:
            weight = model.get_submodule("lm_head").weight.data
            weight[0, 0] = torch.nextafter(weight[0, 0], weight[0, 0] + 1)
        elif len(calls) == 3:
            model.load_state_dict(bench.model().state_dict())
        return loss_of(self, model, step)

    monkeypatch.setattr(Bench, "loss", loss)
    found = distinct_gradients(bench)
    assert found == {"times": 6, "distinct": 1 if repeats else 2}


def test_compute_alone_holds_one_gradient_at_a_time():
    bench, held = bench_of(), []
    bench.options.compute_steps = 1
    made = bench.model

    def model():
        found = made()
        params = list(found.parameters())
        for param in params:
            param.register_post_accumulate_grad_hook(
                lambda _: held.append(sum(each.grad is not None for each in params))
            )
        return found

    bench.model = model
    assert compute_seconds(bench)["count"] == 1
    assert set(held) == {1}
