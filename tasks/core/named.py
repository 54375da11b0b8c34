"""What people mean by an id or the beginning of one: the id itself, or an error with the candidates or the nearest names."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from tasks.core.levels import plain
from tasks.errors import UsageError

SHOWN = 10
"""Candidates that an error lists; it says how many more there are."""
MOST_COMPARED = 5_000
"""Names that are compared letter by letter; comparing is slow."""


def charge_of(given: str, known: Mapping[str, str], where: str) -> str:
    """The key that is given or that begins like that.

    Args:
        given: whole or first characters of a key.
        known: what each key is, in words, by key.
        where: days that were looked at, in words.

    Raises:
        UsageError: several keys begin like that, or none; carries found, candidates.
    """
    if given in known:
        return given
    fits = sorted(key for key in known if key.startswith(given))
    if len(fits) == 1:
        return fits[0]
    if fits:
        raise UsageError(
            f"charge {plain(given)} is the beginning of {len(fits):,} charges {where}. Give more characters of one of:"
            + _lines(fits, known),
            found=given,
            candidates=fits,
        )
    near = sorted(known, key=lambda key: (-_alike(key, given), key))[:SHOWN]
    raise UsageError(
        f"charge {plain(given)}: none of {len(known):,} charges {where} has that key or begins like it. Nearest:"
        + _lines(near, known)
        + ("" if near else " there are none; run the night for these days."),
        found=given,
        candidates=near,
    )


def named(kind: str, given: str, known: Mapping[str, str], where: str) -> str:
    """The id that is given, in any case, or that goes by that name.

    Args:
        kind: what it is, for the message.
        given: id or name.
        known: name that people use, by id; the id itself where there is none.
        where: days that were looked at, in words.

    Raises:
        UsageError: several ids go by that name, or none; carries found, candidates.
    """
    if given in known:
        return given
    wanted = given.casefold()
    fits = sorted(i for i, name in known.items() if given == name) or sorted(i for i in known if i.casefold() == wanted)
    if len(fits) == 1:
        return fits[0]
    if fits:
        raise UsageError(
            f"{kind} {plain(given)} is the name of {len(fits):,} {kind}s {where}. Give the id of one of:"
            + _lines(fits, known),
            found=given,
            candidates=fits,
        )
    near = _nearest(given, known)
    raise UsageError(
        f"{kind} {plain(given)}: none of {len(known):,} {kind}s with money {where} has that id or name. Nearest:"
        + _lines(near, known)
        + ("" if near else " there are none; run the night for these days."),
        found=given,
        candidates=near,
    )


def _alike(one: str, other: str) -> int:
    """First characters that both have."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _nearest(given: str, known: Mapping[str, str]) -> list[str]:
    """Ids by likeness of id or name; parts count, so that the end of a long path is found."""
    wanted = given.casefold()
    inside = sorted(i for i, name in known.items() if wanted in i.casefold() or wanted in name.casefold())
    names: dict[str, str] = {}
    for i, name in sorted(known.items())[:MOST_COMPARED]:
        names[i] = names[name] = i
    like = [names[n] for n in difflib.get_close_matches(given, list(names), SHOWN, 0.3)]
    return list(dict.fromkeys([*inside, *like, *sorted(known)]))[:SHOWN]


def _lines(keys: list[str], known: Mapping[str, str]) -> str:
    told = [f"\n  {plain(key)}" + (f"  {plain(known[key])}" if known[key] != key else "") for key in keys[:SHOWN]]
    more = len(keys) - SHOWN
    return "".join(told) + (f"\n  … {more:,} more" if more > 0 else "")
