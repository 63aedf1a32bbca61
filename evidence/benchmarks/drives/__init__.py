"""States on a drive: memory under a cap, and steps beside ZeRO-Infinity's."""
