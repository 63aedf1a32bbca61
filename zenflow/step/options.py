"""Options of an engine: how it runs, whatever the update rule."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike

from zenflow.device.kernels.choice import CHOICES, KernelChoice
from zenflow.lanes.copies import PacedLink


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How an engine runs; of all options only the kernels change bits of a result.

    Raises:
        ValueError: An option breaks its rule; the message lists all that do.
    """

    releases: bool = False
    """Whether gradients leave during backward."""
    accumulation_steps: int = 1
    """Number of backward passes per step."""
    offload_sums: bool = False
    """Whether sums of micro-batches' gradients wait on the host, of weights that stay too."""
    link: PacedLink | None = None
    """Emulated bandwidths, on a CPU only; None does not pace the copies."""
    host_threads: int | None = None
    """Number of threads that work on the host's rows; None leaves some cores to the others."""
    kernels: KernelChoice = "auto"
    """Kernels of the device's pass over gradients and weights."""
    timeline_steps: int = 0
    """Number of last steps whose spans are kept."""
    wait_timeout: float = 600.0
    """Seconds after which a wait is an error."""
    state_dir: str | PathLike[str] | None = None
    """Folder on a drive for the host's states; None keeps them in memory."""
    drive_tbw: float | None = None
    """Terabytes that the drive's maker warrants to be written; None where nobody says."""

    def __post_init__(self) -> None:
        """Check all options together."""
        passes, threads, tbw = self.accumulation_steps, self.host_threads, self.drive_tbw
        rules = [
            (
                passes == 1 or self.releases,
                f"accumulation_steps={passes} is for release mode: in keep mode call backward as "
                "often as you like before step()",
            ),
            (
                self.releases or not self.offload_sums,
                "offload_sums is for release mode: make the optimizer with "
                'offload_gradients="release" and accumulation_steps, or leave it out',
            ),
            (passes >= 1, f"accumulation_steps must be at least 1: {passes}"),
            (
                threads is None or threads >= 1,
                f"host_threads must be at least 1, or None for most of the cores: {threads}",
            ),
            (
                self.kernels in CHOICES,
                f"kernels must be one of {', '.join(CHOICES)}, got {self.kernels!r}",
            ),
            (
                self.timeline_steps >= 0,
                f"timeline_steps must be at least 0, got {self.timeline_steps}",
            ),
            (self.wait_timeout > 0, f"wait_timeout must be positive, got {self.wait_timeout}"),
            (
                tbw is None or (tbw > 0 and self.state_dir is not None),
                f"drive_tbw={tbw} is the positive number of terabytes that state_dir's drive is "
                "warranted for: give both, or leave it out",
            ),
        ]
        broken = [text for holds, text in rules if not holds]
        if broken:
            raise ValueError("; ".join(broken))
