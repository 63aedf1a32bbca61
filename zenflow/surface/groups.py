"""Parameter groups that a program puts in the place of the optimizer's, on resuming say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from zenflow.surface.arguments import SETTINGS, check_group
from zenflow.surface.state.checks import ENTRY

ParamGroups = list[dict[str, Any]]
"""Parameter groups as torch's optimizers have them."""


class Groups:
    """Follows `param_groups`, which a program may replace.

    Attributes:
        given: Parameters of each group, as the optimizer was given them.
        taken: Groups that were last taken up; a program may assign another list to
            `param_groups`, and the engine reads this one.
    """

    def __init__(self, param_groups: ParamGroups) -> None:
        """Remember the groups as those that were given."""
        self.given = [list(group["params"]) for group in param_groups]
        self.taken = list(param_groups)
        self._seen = _look(param_groups)

    def add(self, param_groups: ParamGroups) -> None:
        """Take note of a group that was added behind the others."""
        self.given.append(list(param_groups[-1]["params"]))
        self._take(param_groups)

    def follow(self, param_groups: ParamGroups) -> None:
        """Take up groups that a program has put in the place of others, if they are valid.

        Cheap where no group was replaced: hooks call this for every parameter.

        Raises:
            RuntimeError: The groups have other parameters.
            ValueError: A group lacks a setting, or has an invalid one.
        """
        now, seen = _look(param_groups), self._seen
        if len(now) != len(seen) or any(
            a[0] is not b[0] or a[1] is not b[1] or a[2:] != b[2:]
            for a, b in zip(now, seen, strict=True)
        ):
            self._take(param_groups)

    def _take(self, param_groups: ParamGroups) -> None:
        """Check the groups and take them up; errors as in `follow`."""
        self.check_same_params(param_groups)
        for index, group in enumerate(param_groups):
            missing = [name for name in SETTINGS if name not in group]
            if missing:
                raise ValueError(
                    f"parameter group {index} lacks {', '.join(missing)}: each needs all of "
                    f"{', '.join(SETTINGS)}; set them, as in group['lr'] = 1e-4"
                )
            check_group(group)
        param_groups[0].setdefault(ENTRY, "")
        self.taken[:] = param_groups
        self._seen = _look(param_groups)

    def check_same_params(self, param_groups: Sequence[Mapping[str, Any]]) -> None:
        """Check that groups have the parameters that they were given with.

        Raises:
            RuntimeError: They have others, which would not be trained, or not by their settings.
        """
        now = [list(group.get("params", ())) for group in param_groups]
        sizes = [[len(group) for group in groups] for groups in (now, self.given)]
        if sizes[0] != sizes[1] or any(
            a is not b for a, b in zip(chain(*now), chain(*self.given), strict=True)
        ):
            raise RuntimeError(
                "param_groups have other parameters than the optimizer was made with, or the same "
                f"in other groups or another order ({sizes[0]} parameters in groups, which were "
                f"{sizes[1]}). Its memory was laid out by these groups: change their settings in "
                "place, as in group['lr'] = 1e-4, or make a new optimizer"
            )


def _look(param_groups: ParamGroups) -> list[tuple[Any, Any, int, int]]:
    """Return each group, its list of parameters, and the lengths of both."""
    return [(g, g.get("params"), len(g.get("params", ())), len(g)) for g in param_groups]
