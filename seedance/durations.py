"""Lengths of time in ns, by which hosts cut what they write."""

SECOND_NS = 1_000_000_000
HOUR_NS = 3_600 * SECOND_NS
