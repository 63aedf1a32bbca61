"""Controller probes: measurements that are made only where a controller asks for them."""

from __future__ import annotations

from collections.abc import Sequence

from zenflow.columns.layout import Layout, SplitParam
from zenflow.controller import AbstractController
from zenflow.device.base import AbstractDevice, HostValues
from zenflow.rule.importance import ScoreCurve
from zenflow.step.host.tasks import Window
from zenflow.step.window_sketch import WindowSketch


class ControllerProbes:
    """Sketch of open windows and energy curve, each only where the controller asks for it.

    Attributes:
        sketch: Measures open windows' gradients; None unless the controller asks for it.
    """

    def __init__(
        self,
        controller: AbstractController,
        layout: Layout,
        device: AbstractDevice,
        windows: Sequence[Window],
    ) -> None:
        """Make the probes that the controller asks for; none for a layout without columns."""
        self._controller = controller
        self._device = device
        self._scores = layout.columns.scores
        self._curve_interval = controller.curve_interval
        self.sketch: WindowSketch | None = None
        self._curve: ScoreCurve | None = None
        if controller.measures_windows and layout.splits:
            self.sketch = WindowSketch(layout, device, windows)
            self.follow()
        if controller.curve_interval and layout.splits:
            self._curve = ScoreCurve(layout.widths, device.torch_device)

    @property
    def watching(self) -> WindowSketch | None:
        """Sketch, if it takes gradients in this step; else None."""
        return self.sketch if self.sketch is not None and self.sketch.is_watching else None

    def follow(self) -> None:
        """Between two steps, begin or cease to sketch windows, as the controller wants."""
        if self.sketch is not None:
            self.sketch.watch(self._controller.looks_at_windows)

    def read(
        self, present: Sequence[SplitParam], next_due: Sequence[int], step: int
    ) -> tuple[list[int], HostValues | None]:
        """Measure a step whose gradients are good, before any window ends with it.

        Args:
            present: Parameters with a gradient in it.
            next_due: Step at which each block's window ends.
            step: The step's number.

        Returns:
            Number of gradients in each block's window (`WindowSketch.ages`), empty without a
            sketch; and the values of `ScoreCurve.read`, None in a step without a curve.
        """
        ages: list[int] = []
        if self.watching is not None:
            ages = self.watching.ages(present)
            self.watching.close(next_due, step)
        if self._curve is None or step % self._curve_interval:
            return ages, None
        return ages, self._device.to_host(self._curve.read(self._scores))
