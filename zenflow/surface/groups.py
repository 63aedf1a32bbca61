"""Parameter groups that a program puts in the place of the optimizer's, on resuming say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from torch import Tensor

from zenflow.surface.arguments import SETTINGS, check_group
from zenflow.surface.state.checks import ENTRY
from zenflow.surface.with_engine import WithEngine

Look = list[tuple[Any, Any, int, int]]
"""Identities of each group and of its list of parameters, and the lengths of both."""


class FollowsGroups(WithEngine):
    """The part of the optimizer's surface about `param_groups` that were replaced."""

    _given: list[list[Tensor]]
    """Parameters of each group, as the optimizer was given them."""
    _groups_of_engine: list[dict[str, Any]]
    """List that the engine reads; a program may assign another list to `param_groups`."""
    _seen: Look
    """Identities of the groups when they were last checked."""

    def _note_groups(self) -> None:
        """Remember the present groups as those that were given."""
        self._given = [list(group["params"]) for group in self.param_groups]
        self._groups_of_engine = list(self.param_groups)
        self._seen = self._look()

    def _add_group(self) -> None:
        """Take note of a group that was added behind the others."""
        self._given.append(list(self.param_groups[-1]["params"]))
        self._take_groups()

    def _look(self) -> Look:
        groups = self.param_groups
        return [(g, g.get("params"), len(g.get("params", ())), len(g)) for g in groups]

    def _follow_groups(self) -> None:
        """Take up groups that a program has put in the place of others, if they are valid.

        Cheap where no group was replaced: hooks call this for every parameter.

        Raises:
            RuntimeError: The groups have other parameters.
            ValueError: A group lacks a setting, or has an invalid one.
        """
        now, seen = self._look(), self._seen
        if len(now) != len(seen) or any(
            a[0] is not b[0] or a[1] is not b[1] or a[2:] != b[2:]
            for a, b in zip(now, seen, strict=True)
        ):
            self._take_groups()

    def _take_groups(self) -> None:
        """Check the groups and take them up; errors as in `_follow_groups`."""
        check_same_params(self.param_groups, self._given)
        for index, group in enumerate(self.param_groups):
            missing = [name for name in SETTINGS if name not in group]
            if missing:
                raise ValueError(
                    f"parameter group {index} lacks {', '.join(missing)}: each needs all of "
                    f"{', '.join(SETTINGS)}; set them, as in group['lr'] = 1e-4"
                )
            check_group(group)
        self.param_groups[0].setdefault(ENTRY, "")
        self._groups_of_engine[:] = self.param_groups
        self._seen = self._look()


def check_same_params(
    param_groups: Sequence[Mapping[str, Any]], given: Sequence[Sequence[Tensor]]
) -> None:
    """Check that the groups have the parameters that they were given with.

    Args:
        param_groups: The groups as they are.
        given: The parameters that each group had when it was given.

    Raises:
        RuntimeError: The groups have others, which would not be trained, or not by their settings.
    """
    now = [list(group.get("params", ())) for group in param_groups]
    sizes = [[len(group) for group in groups] for groups in (now, given)]
    if sizes[0] != sizes[1] or any(
        a is not b for a, b in zip(chain(*now), chain(*given), strict=True)
    ):
        raise RuntimeError(
            "param_groups have other parameters than the optimizer was made with, or the same in "
            f"other groups or another order ({sizes[0]} parameters in groups, which were "
            f"{sizes[1]}). Its memory was laid out by these groups: change their settings in "
            "place, as in group['lr'] = 1e-4, or make a new optimizer"
        )
