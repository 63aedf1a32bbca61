"""Prices: what a machine's parts cost, where they are given. None are shipped: they change."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from experiments.request.words import float_in
from sim.names import fold, nearest
from zenflow.errors import ConfigError

if TYPE_CHECKING:
    import pandas as pd

COLUMN = "price_usd"
_COLUMNS = {"device_name": "num_devices", "host_name": "num_hosts", "link_name": "num_devices"}
"""Columns of a table's parts, and of how many there are."""


def parse_prices(texts: Sequence[str]) -> dict[str, float]:
    """Return the price of each named part from words like ``rtx4090=1600``.

    Raises:
        ConfigError: There is no such part, or the price is no positive number.
    """
    prices: dict[str, float] = {}
    for text in texts:
        name, _, word = text.partition("=")
        price = float_in(word)
        if not (math.isfinite(price) and price > 0):
            raise ConfigError(
                f"--price takes a part and its price in dollars, got {text!r}: rtx4090=1600"
            )
        prices[_part(name)] = price
    return prices


def _part(name: str) -> str:
    from sim.hardware import catalog

    for find in (catalog.find_device, catalog.find_host, catalog.find_link):
        try:
            return find(name).name
        except ConfigError:
            continue
    names = [*catalog.names("device"), *catalog.names("host"), *catalog.names("link")]
    known = {fold(known): known for known in names}
    raise ConfigError(
        f"--price: there is no device, host or link {name!r}: {nearest(name, known)}"
    )


def unpriced(frame: pd.DataFrame, prices: Mapping[str, float]) -> list[str]:
    """Return the parts of a table that have no price, though another one of their kind has."""
    found: dict[str, None] = {}
    for column in _COLUMNS:
        names = [name for name in frame[column].unique() if name]
        if any(name in prices for name in names):
            found |= dict.fromkeys(name for name in names if name not in prices)
    return list(found)


def add_prices(frame: pd.DataFrame, prices: Mapping[str, float]) -> pd.DataFrame:
    """Return the table with a column `COLUMN`: of the parts that have a price.

    A row has none where a device, host or link has no price though another one of its kind has.
    """
    total = frame["num_devices"] * 0.0
    for column, count in _COLUMNS.items():
        own = frame[column].map(prices)
        if own.notna().any():
            total = total + own * frame[count]
    return frame.assign(**{COLUMN: total.where(total > 0)})
