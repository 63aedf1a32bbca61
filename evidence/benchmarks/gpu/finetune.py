"""A pretrained model fine-tuned with all states on the device and under zenflow, side by side.

    python -m evidence.benchmarks.gpu.finetune --prepare tokens.npz --model FOLDER --data TEXTS
    python -m evidence.benchmarks.gpu.finetune --model FOLDER --tokens tokens.npz [--out DIR]
    python -m evidence.benchmarks.gpu.finetune --smoke    a tiny random decoder on the CPU

The model is a folder of transformers, or a GGUF file, whose weights are made plain numbers again;
nothing is asked of a hub. Tokens are made beforehand, since the machine with the GPU need not have
the texts. Runs share the GPU as processes: losses do not depend on timing. One run is saved
half-way and resumed by another process, whose weights must end bit-equal.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from evidence.benchmarks.gpu.pretrained import Tokens, prepare
from evidence.benchmarks.gpu.setup import MODELS
from evidence.benchmarks.record import setting
from evidence.studies.language_model.model import load_model
from experiments.output.files import replacing, write_json
from experiments.training.parts.models.decoder import LanguageModel, init_weights
from zenflow import ZenFlowAdamW, ZenFlowConfig

RULES: Mapping[str, Mapping[str, Any]] = {
    "on_device": {"topk_ratio": 1.0},
    "S 4": {},
    "S 16": {"update_interval": 16},
}
"""Changes that each run makes to zenflow's defaults."""
SAVED, RESUMED = "S 4", "resumed"
"""The run, of the first seed, that is saved half-way, and the name of the one that goes on."""
_LR, _WARM_SHARE = 3e-5, 0.1
_LOOKS = 0.5
"""Seconds between two looks at the runs."""
_SMOKE: Mapping[str, Any] = {
    "steps": 8,
    "every": 2,
    "batch": 2,
    "sequence": 16,
    "seeds": 1,
    "knobs": {"min_split_elements": 1},
}


class FineTuning:
    """One run in this process."""

    def __init__(self, options: Namespace, rule: str, seed: int) -> None:
        """Make the model and its optimizer."""
        self._options, self._seed = options, seed
        self._device = torch.device("cpu" if options.smoke else "cuda:0")
        self._tokens = Tokens(options.tokens, options.batch, options.sequence, seed)
        self._model = self._made().to(self._device)
        config = ZenFlowConfig(**{**options.knobs, **RULES[rule]})
        self.optimizer = ZenFlowAdamW(
            self._model.named_parameters(), lr=_LR, config=config, max_grad_norm=1.0,
            offload_gradients="release", host_threads=options.host_threads,
        )  # fmt: skip
        warm = max(1, int(_WARM_SHARE * options.steps))
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer,
            lambda step: min((step + 1) / warm, max(0.0, 1 - step / options.steps)),
        )
        self.losses: list[float] = []
        self.held_out: dict[int, float] = {}

    def _made(self) -> nn.Module:
        if self._options.model is not None:
            return load_model(self._options.model)
        model = LanguageModel(MODELS["tiny"])
        init_weights(model, 0)
        return model.to(torch.bfloat16)

    def _loss(self, batch: Tensor) -> Tensor:
        tokens = batch.to(self._device)
        logits = self._model(tokens[:, :-1]).logits
        return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    def run(self, first: int, saved: Path | None, report: Path) -> dict[str, Any]:
        """Take steps from `first` to the end, and write what has been found as they go.

        Args:
            first: Number of steps taken before.
            saved: Where to save the run half-way; None does not.
            report: File for the losses.
        """
        losses = []
        for step in range(first, self._options.steps):
            loss = self._loss(self._tokens.train(step))
            loss.backward()
            self.optimizer.step()
            self._schedule.step()
            losses.append(loss.detach())
            if (step + 1) % self._options.every == 0:
                self.losses += torch.stack(losses).tolist()
                losses.clear()
                self.held_out[step + 1] = self._evaluate()
                write_json(report, self.found())
            if saved is not None and step + 1 == self._options.steps // 2:
                self._save(saved)
        return self.found() | {"weights": self._digest()}

    def found(self) -> dict[str, Any]:
        """Return the losses so far, JSON-ready."""
        return {"losses": self.losses, "held_out": self.held_out, "weights": None}

    @torch.no_grad()
    def _evaluate(self) -> float:
        with self.optimizer.true_weights():
            return fmean(float(self._loss(batch)) for batch in self._tokens.held_out())

    def _digest(self) -> str:
        """Return a digest of the weights as they are with all updates landed."""
        digest = hashlib.sha256()
        with self.optimizer.true_weights():
            for param in self._model.parameters():
                digest.update(param.detach().cpu().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def _save(self, path: Path) -> None:
        state = {
            "model": self._model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self._schedule.state_dict(),
        }
        with replacing(path) as draft:
            torch.save(state, draft)

    def load(self, path: Path) -> None:
        """Take up what another process has saved."""
        state = torch.load(path, map_location="cpu", weights_only=True)
        self._model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self._schedule.load_state_dict(state["schedule"])


def run_one(options: Namespace) -> int:
    """Take one run in this process."""
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)  # else no run repeats bit for bit
    torch.set_num_threads(1)
    rule, seed = options.run[0], int(options.run[1])
    resumes = rule == RESUMED
    tuning = FineTuning(options, SAVED if resumes else rule, seed)
    with closing(tuning.optimizer):
        first, saved = 0, options.state if (rule, seed) == (SAVED, 0) else None
        if resumes:
            tuning.load(options.state)
            first = options.steps // 2
        report = options.out / f"{rule} {seed}.json"
        write_json(report, tuning.run(first, saved, report))
    return 0


def run_all(options: Namespace) -> dict[tuple[str, int], int | None]:
    """Take all runs, as processes at once; return their exit codes."""
    waiting = [(rule, seed) for seed in range(options.seeds) for rule in RULES]
    running: dict[tuple[str, int], subprocess.Popen[bytes]] = {}
    with tempfile.TemporaryDirectory(prefix="zenflow-finetune-") as folder:
        state = Path(folder) / "half.pt"
        resumed = (RESUMED, 0)
        while True:
            if state.is_file() and resumed not in running:
                running[resumed] = _started(resumed, state, options)
            busy = [run for run, process in running.items() if process.poll() is None]
            while waiting and len(busy) < options.together:
                run = waiting.pop(0)
                running[run] = _started(run, state, options)
                busy.append(run)
            write_json(options.out / "figures.json", figures_of(reports_of(options.out)))
            if not busy and not waiting and (resumed in running or not state.is_file()):
                return {run: process.returncode for run, process in running.items()}
            time.sleep(_LOOKS)


def _started(run: tuple[str, int], state: Path, options: Namespace) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "evidence.benchmarks.gpu.finetune",
        "--run",
        run[0],
        str(run[1]),
    ]
    command += ["--out", str(options.out), "--state", str(state)]
    command += ["--steps", str(options.steps), "--host-threads", str(options.host_threads)]
    for flag, path in (("--model", options.model), ("--tokens", options.tokens)):
        command += [] if path is None else [flag, str(path)]
    command += ["--smoke"] if options.smoke else []
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    return subprocess.Popen(command, env=environment)


def reports_of(out: Path) -> dict[str, dict[str, Any]]:
    """Return the results of the runs so far, by their names."""
    names = [f"{rule} {seed}" for rule in (*RULES, RESUMED) for seed in range(9)]
    return {
        name: json.loads((out / f"{name}.json").read_text(encoding="utf-8"))
        for name in names
        if (out / f"{name}.json").is_file()
    }


def figures_of(reports: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return how far the held-out losses end above the device's, seed by seed, and the resume."""
    found: dict[str, Any] = {}
    above: dict[str, list[float]] = {}
    for name, report in reports.items():
        rule, _, seed = name.rpartition(" ")
        device = reports.get(f"on_device {seed}", {"held_out": {}})
        common = set(report["held_out"]) & set(device["held_out"])
        if not common:
            continue
        last = max(common, key=int)
        found[f"held-out loss at {last}, {name}"] = report["held_out"][last]
        above.setdefault(rule, []).append(
            100 * (report["held_out"][last] / device["held_out"][last] - 1)
        )
    for rule in ("S 4", "S 16"):
        if rule in above:
            found[f"loss above on_device's, {rule}, %"] = fmean(above[rule])
    pair = [reports.get(f"{name} 0", {}).get("weights") for name in (SAVED, RESUMED)]
    if all(pair):
        found["resumed bit for bit"] = pair[0] == pair[1]
    return found


def parse(arguments: Sequence[str] | None) -> Namespace:
    """Return the command's options."""
    parser = argparse.ArgumentParser(description="Fine-tuning of a pretrained model.")
    add = parser.add_argument
    add("--model", type=Path, help="folder or GGUF file")
    add("--tokens", type=Path, help="what --prepare has made")
    add("--prepare", type=Path, metavar="FILE", help="write tokens of --data and end")
    add("--data", type=Path, help="texts, a file or a folder")
    add("--out", type=Path, default=Path("runs/gpu_finetune"))
    add("--steps", type=int, default=400)
    add("--seeds", type=int, default=3)
    add("--together", type=int, default=9, help="runs that share the GPU")
    add("--host-threads", type=int, default=1, help="of each run")
    add("--smoke", action="store_true", help="tiny, on the CPU: tests the script")
    add("--run", nargs=2, metavar=("RULE", "SEED"), help=argparse.SUPPRESS)
    add("--state", type=Path, help=argparse.SUPPRESS)
    parser.set_defaults(every=50, batch=8, sequence=512, knobs={})
    options = parser.parse_args(arguments)
    if options.smoke:
        vars(options).update(_SMOKE)
    needed = ("model", "data") if options.prepare else () if options.smoke else ("model", "tokens")
    for name in needed:
        path = getattr(options, name)
        if path is None or not path.exists():
            parser.error(f"--{name} must name what is there, got {path}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Prepare tokens, take one run or take all; return the process's exit code."""
    options = parse(arguments)
    if options.prepare is not None:
        prepare(options.model, options.data, options.prepare)
        return 0
    if not options.smoke and not torch.cuda.is_available():
        print("torch sees no CUDA device: install a CUDA build of torch", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    if options.run is not None:
        return run_one(options)
    codes = run_all(options)
    figures = figures_of(reports_of(options.out))
    shown = {f"{rule} {seed}": code for (rule, seed), code in codes.items()}
    write_json(options.out / "record.json",
               setting(smoke=options.smoke, codes=shown, figures=figures))  # fmt: skip
    print("\n".join(f"{name}: {value}" for name, value in figures.items()))
    is_sound = not any(codes.values()) and figures.get("resumed bit for bit", False)
    return 0 if is_sound else 1


if __name__ == "__main__":
    sys.exit(main())
