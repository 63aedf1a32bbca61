"""What docs/results says of each study, in words; the numbers below it are the record's own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.lab.record import README, needed
from experiments.output.provenance import newest_record


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One study of docs/results. Every number of its text is in its record; a test holds it.

    The index shows the first paragraph of the text, and the first item of a list that follows it.
    """

    title: str
    record: str
    """Key of the study; name in the folder's where the file is no study's page."""
    kind: str
    command: str
    file: str = README
    """File of the record that is shown below the text."""
    elsewhere: str = ""
    """Page of docs/ that has the study in full; else one is made."""
    is_former: bool = False
    """Whether the record is of the update rule before the exact one."""
    text: str

    @property
    def folder(self) -> Path:
        """Folder of the newest committed record."""
        if self.file == README:
            return needed(self.record).folder
        return newest_record(self.record, self.file)

    @property
    def address(self) -> str:
        """Page that has the study in full, from docs/."""
        name = self.record if self.file == README else Path(self.file).stem
        return self.elsewhere or f"results/{name}.md"

    @property
    def opening(self) -> str:
        """What the index shows of the text."""
        first, *others = self.text.strip().split("\n\n")
        item = re.match(r"- (.*?)(?=\n- |\Z)", others[0] if others else "", flags=re.DOTALL)
        return " ".join(f"{first} {item[1] if item else ''}".split())


SECTIONS: Sequence[Section] = (
    Section(
        title="Stall and loss over an emulated link",
        record="stall_and_loss",
        kind="emulated",
        command="zenflow study stall_and_loss",
        text="""\
Two cores of a virtual machine play device and host, over an emulated link of 54.0 MB/s each way.
A decoder of 836,992 parameters goes on learning Python's own source, 500 steps from a common
start.

- `zenflow` is without 99.2% of `zero_offload`'s stall seconds in every seed. What its steps take
  beside `on_device`'s is not waiting: here the host's update has the device's own cores.
- With seed 0, a step takes 64 ms under `on_device`, 169 ms under `zero_offload`, and 81 ms under
  `zenflow_paper` and `zenflow`. They stall for 0%, 53.1%, 4.8% and 0.9% of it.
- Its held-out loss is within 0.14% of `on_device`'s.
""",
    ),
    Section(
        title="Accuracy by regime",
        record="accuracy",
        kind="measured",
        command="zenflow study accuracy",
        text="""\
From random weights, where late updates hurt most, and in fine-tuning: means of three seeds, each
beside AdamW with the same seed. A model of 10.7M parameters has one seed.

- From random weights the default ends 2.04% below AdamW's loss at 1e-3, 1.35% below at 4e-4 and
  0.54% below at 2e-4. S = 16 ends 2.74%, 1.95% and 0.83% below. No seed ends more than 0.12%
  above. The published rule ends 21.07% to 25.72% above.
- At 2e-3, where AdamW itself is worse, the default ends 3.39% below and S = 16 2.54% below. Single
  seeds end up to 0.67% above. S = 1 ends 1.94% above, and the published rule 32.89%.
- In fine-tuning the default ends 0.02% below at 3e-4 and 0.12% below at 1e-3, S = 32 0.14% and
  0.71% below. The published rule ends 4.09% to 5.64% above.
- With bfloat16 weights the default ends 2.06% below from random weights, and 0.05% above in
  fine-tuning.
- The model of 10.7M parameters ends 3.10% below with the default and 8.28% below with S = 16. The
  published rule ends 23.31% above, and this project's former rule 12.14%.
""",
    ),
    Section(
        title="What each knob of the update rule is worth",
        record="update_rule",
        kind="measured",
        command="zenflow study update_rule",
        text="""\
One setting at a time is changed about the default. Losses are beside AdamW's with the same seed;
means of three seeds.

- No change is better in all seeds. From random weights at 1e-3 the default ends 2.04% below AdamW.
  S = 16 ends 2.74% below, S = 32 0.82%, S = 1 0.75%, and k = 0 1.43%.
- In fine-tuning at 3e-4 the default ends 0.02% below. All other lengths and ratios end 0.00% to
  0.17% below.
- A step that is one step late as a whole, with nothing in its place, ends 29.24% above from random
  weights and 0.49% above in fine-tuning. The published rule ends 25.72% and 5.64% above.
""",
    ),
    Section(
        title="What late updates are stable up to",
        record="stability",
        kind="simulated",
        command="zenflow study stability",
        text="""\
Limits are *simulated*, on a quadratic; the curvature that trainings meet is *measured*.
[Why late updates need the gradient in hand](late_updates.md) explains both.

- AdamW is stable up to 37.8 in learning rate times curvature, and up to 1 with a gradient that is
  one step late. No lead of the upload brings that above 3.01.
- With the fresh gradient it is 38, 14 and 5.9 at S = 1, 4 and 16.
- AdamW's own training from random weights meets up to 16.6.
""",
    ),
    Section(
        title="Rules for late updates, from random weights",
        record="late_updates",
        kind="measured",
        command="zenflow study late_updates",
        text="""\
The rules alone, with logical delays in one thread, on one small decoder. One seed: single runs
differ by 1 to 2% when only their rounding differs.

- At 1e-3 and S = 4 the former rule ends 21.8% above AdamW, and an exact host without the fresh
  gradient 31.1%. With the fresh gradient it is 1.6% below.
- Longer windows hold: 1.1% below at S = 16, 0.5% above at S = 64. A second moment by columns alone
  does as well at S = 16, and ends 2.9% above at S = 64.
- At twice the rate, where AdamW itself is worse, nothing is lost either.
""",
    ),
    Section(
        title="What a late update costs",
        record="staleness",
        kind="measured",
        command="zenflow study staleness",
        text="""\
In steps of AdamW: *efficiency* is the share of its steps with which the device alone reaches the
same held-out loss. A small decoder from random weights; numbers are means of three seeds.

- At AdamW's best learning rate, 1e-3, a step is worth 1.084 of AdamW's with k = 0.1 and S = 4. It
  is 1.082 with S = 16, 1.031 with S = 32 and 0.988 with S = 64.
- At twice that rate it is 1.039 with S = 4, 1.013 with S = 16 and 0.913 with S = 64.
- Without columns on the device, k = 0, a step is worth 1.038 with S = 16 and 0.840 with S = 64. At
  twice the rate that is 0.937 and 0.768.
- With k = 0.3 the mean is above 1 at all of these rates, with S up to 64. At twice the best rate
  and S = 64 one seed of three is at 0.946.

The tuner weighs speed against this. It counts a step that is worth more than AdamW's as one.
""",
    ),
    Section(
        title="Accuracy on a real task",
        record="sst2",
        kind="measured",
        command="zenflow study sst2",
        text="""\
A pretrained encoder learns the sentiment of 2560 sentences (SST-2) in 3 epochs: 240 steps.

- `zenflow` keeps AdamW's accuracy: 84.33% both, 84.53% with S = 16 and in the tuned run, 84.35%
  with k = 0.02.
- The published rule loses 4.69 points, and 25.97 with S = 16. It moves a deferred weight once in a
  window, by one step of AdamW, and has learnt less by then.
""",
    ),
    Section(
        title="The tuner on machines that it does not know",
        record="hidden_machines",
        kind="simulated",
        command="zenflow study hidden_machines",
        text="""\
30 simulated machines differ from what the tuner's simulator says: in their constants, in kinds of
contention that it does not have, and in steps with heavy tails.

- While tuning, 20 stretches of steps lose 2.1% against the best fixed setting. GP loses 29.1%,
  TPE 28.1%, random search 41.6%, the simulator without correction 4.2%, the defaults 24.1%.
- In the end the tuner is 1.4% from the best (mean), and TPE 0.6%. No stretch of any machine was
  more than 1.15 times as slow as the defaults.
- After a link becomes slower it is back within 5% of the new best after 1.5 stretches (median). On
  one machine of 30 it was not back in the ten stretches that were left.
""",
    ),
    Section(
        title="The tuner on the real engine",
        record="tuned_goodput",
        kind="emulated",
        command="zenflow study tuned_goodput",
        text="""\
Runs of 2,400 steps, about two minutes each, with everything that tuning costs. They take turns
with the best of 35 fixed settings and with the defaults, over links of 47, 94 and 188 MB/s; three
seeds.

- Tuned goodput is 0.991, 0.993 and 0.988 of the best fixed setting's, from the slow link to the
  fast one.
- It is 1.271, 1.012 and 1.002 of the defaults'. Over the fast link there is nothing to win.
- Searching took 0.92% to 0.99% of a run's time beside it.
- After the link became 4 times slower, goodput was back within 5% of the best for it after 23
  windows of 20 steps.
""",
    ),
    Section(
        title="What tuning does to accuracy",
        record="tuned_loss",
        kind="emulated",
        command="zenflow study tuned_loss",
        is_former=True,
        text="""\
After 2000 tuned steps over the slow link, held-out loss is within 0.01% of `on_device`'s, seed by
seed. The runs took 4 to 12 decisions each, and ended at k = 0.3 or 0.5.
""",
    ),
    Section(
        title="Predictions beside measurements of this engine",
        record="validation",
        kind="emulated",
        command="zenflow study validation",
        elsewhere="validation.md",
        text="""\
This engine on a CPU over emulated links. 17 runs that calibrated nothing: step time is off by 1.9%
(median), 3.2% (90th percentile), and the rank correlation is 1.000. 12 runs that two ranks share
under DDP and FSDP2, over gloo: it is off by 2.0% (median), 3.7% (90th percentile).
""",
    ),
    Section(
        title="Predictions beside others' measurements",
        record="published",
        kind="simulated",
        command="zenflow study published",
        elsewhere="validation.md",
        text="""\
Predictions are from the table of hardware and the models' configurations alone. Rows whose sources
state all that a prediction needs, and which were entered before they were predicted, are off by
6.8% (median), 22.8% (90th percentile). All published rows are off by 10.4% and 47.4%.
[Errors by regime](validation.md#absolute-errors-by-regime) has the others, and apart those of rows
that were entered last.
""",
    ),
    Section(
        title="The host's update beside its rivals",
        record="benchmarks",
        kind="measured",
        command="make bench",
        file="host_update.txt",
        text="""\
Two cores and 64M parameters (67108864), on an AMD EPYC. A pass that takes q gradients in moves
26/q + 2 bytes a step of an element.

- With q = 1 the update reaches 1.11 to 1.34 of a plain triad's bandwidth, and 1.43 to 1.64 times
  the speed of cast + torch's fused AdamW + cast.
- With q = 4 one core takes 1369 million steps a second in place of 787, and two take 2722 in place
  of 1319. Square roots and divisions bound it then, not memory: two cores that have 45.1 GB/s to
  themselves are not where waiting pays most.
- The published rule's sums and one step a window take as long as the exact rule with q = 4.

DeepSpeed was not installed. An earlier version on another EPYC had 1.32 to 1.42 times the speed of
its CPUAdam
([record](../evidence/results/2026-11-21_benchmarks_amd-epyc/host_update.txt)).
""",
    ),
    Section(
        title="The engine's own cost per step",
        record="benchmarks",
        kind="measured",
        command="make bench",
        file="step_overhead.txt",
        text="""\
With the host idle, beside torch's foreach AdamW on the same tensors:

- Small matrices stay on the device by default. For 30 to 1000 of them a step takes 0.44 to 1.06
  times as long as torch's.
- For matrices of 256 x 256, the smallest that the default shares out, the training thread takes
  1.11 to 2.07 times as long: the aim of 2 is missed for 30 of them where gradients are released.
  About a quarter of it is fresh steps, which read gradients and write weights once more.
- Wall time, with the copies that a GPU's engines would make, is 1.32 to 2.39 times torch's.
""",
    ),
    Section(
        title="What a step asks of the interpreter",
        record="benchmarks",
        kind="emulated",
        command="make bench",
        file="interpreter_load.txt",
        text="""\
A decoder of 1B parameters, shrunk until arithmetic takes no time, with the real one's numbers of
blocks and buckets. The CPU plays the GPU. *Lock* is how long the interpreter's lock is held in a
step, by all threads together; sampled from outside.

- In release mode that is 14.23 ms, and 58.17 ms in a version whose host's parts are Python's and
  that takes no fresh steps (209ba0f). The ratio is 4.03 (quartiles 3.74 and 4.93).
- In keep mode it is 10.53 ms and 62.04 ms: 5.98 (5.41 to 7.24).
- The host's threads hold it for 0.97 ms in release mode, and held it for 32.99 ms. What is left is
  the training thread's: hooks, fresh steps and packing.
""",
    ),
    Section(
        title="Speed of the simulator",
        record="benchmarks",
        kind="measured",
        command="make bench",
        file="sim_speed.txt",
        text="""\
One core simulates 344 to 983 steps of a 32-layer model a second, 2.7 to 6.3 times as long as as
many events that do nothing. The closed forms answer for 71,181 to 515,198 machines a second. The
aims are 500 and 100,000: the published rule and delayed updates miss the first here, and the
engine's forms the second.

A sweep's points, from end to end, with selections that recur:

- 26,399 a second where a formula answers, which takes 2.7 times as long as the formula alone;
- 1,609 where they differ in rates, of which SimPy answers 13;
- 514 of other machines, where SimPy answers 14, and 332 of other models, where it answers 20;
- 162 of other settings of the engine, where SimPy answers 17.
""",
    ),
)
