"""How providers lay out their exports: names of files in, complete deliveries and what is wrong with the others out.

Known are AWS Data Exports (data and metadata by BILLING_PERIOD, a manifest that names every part), Azure exports (a folder
a run with its manifest), sets of Parquet files by BILLING_PERIOD (as exported from BigQuery), and plain files, each a
delivery of its own. Reads manifests through the source; knows no charge, no lake and no clock.

Source: infra/rules/lake.md 8; AWS Data Exports documentation, export delivery; Microsoft Cost Management documentation,
exports with manifest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any, Protocol

from tasks.core.focus_values import parse_instant
from tasks.core.snapshots import instant_text
from tasks.errors import DeliveryError

EXPORT = re.compile(
    r"(?P<export>(?:.*/)?)(?P<kind>data|metadata)/billing_period=(?P<period>[0-9]{4}-[0-9]{2})/(?P<rest>.+)",
    re.IGNORECASE,
)
EXECUTION = re.compile(r"(\d{4})-?(\d{2})-?(\d{2})T?(\d{2})[:-]?(\d{2})[:-]?(\d{2})(?:\.(\d{1,6}))?\d*Z?-.+", re.ASCII)
"""`<timestamp>-<executionId>`, with or without punctuation in the timestamp."""
RUN = re.compile(r"(?P<export>(?:.*/)?)(?P<span>[0-9]{8}-[0-9]{8})/(?P<rest>.+)")
"""`<export>/<first day>-<last day>/<run>/<file>` of an Azure export."""
SET = re.compile(r"(?P<export>(?:.*/)?)billing_period=(?P<period>[0-9]{4}-[0-9]{2})/(?P<rest>.+)", re.IGNORECASE)
PLAIN_FILES = (".csv", ".csv.gz", ".parquet")
MANIFEST = "manifest.json"
FOCUS_TYPE = "FocusCost"
WHOLE_FRAMES = ("MonthToDate", "BillingMonthToDate", "TheCurrentMonth", "TheLastMonth", "TheLastBillingMonth", "Custom")
"""Time frames of Azure exports that can hold a whole billing period. Source: Cost Management exports API, TimeframeType."""

Tagged = tuple[tuple[str, str | None], ...]


@dataclass(frozen=True)
class Candidate:
    """A complete delivery that has not been read yet.

    Args:
        name: manifest, folder or file below the source's URL, for people.
        group: the file, or export and billing period: what a newer delivery of the same group replaces.
        delivered_at: sortable UTC text, from the layout's timestamp, else the time of modification.
        main: the billing period's own manifest names it, not only that of an execution; True in other layouts.
        period: billing period of its folder, YYYY-MM; None where the rows say for which periods they speak.
        files: paths in the file system, each with a tag that changes whenever the file does, or None.
        rows: number of rows that its manifest promises; None where none does.
        begins: first day that it covers, where its layout says so: billing periods that began earlier are not whole in it.
        announced: a manifest, or the file itself, says which files belong to it; False where all of a folder do.
    """

    name: str
    group: str
    delivered_at: str
    main: bool
    period: str | None
    files: Tagged
    rows: int | None = None
    begins: date | None = None
    announced: bool = True


class Files(Protocol):
    """What layouts need of a source."""

    url: str

    def fetch(self, path: str) -> bytes: ...
    def modified(self, path: str) -> str: ...
    def size(self, path: str) -> int | None: ...
    def tagged(self, paths: Sequence[str]) -> Tagged: ...
    def refuse(self, path: str, problem: str, then: str, **facts: Any) -> DeliveryError: ...


Outcome = tuple[list[Candidate], list[DeliveryError]]


def shown(text: str) -> str:
    """The text with what UTF-8 cannot hold escaped: file names need not be UTF-8 (`\\xff`)."""
    if not text.isascii():
        text = text.encode("utf-8", "backslashreplace").decode()
        text = re.sub(r"\\udc([89a-f][0-9a-f])", r"\\x\1", text)
    return text


def deliveries_in(source: Files, files: Mapping[str, str], *, alone: bool) -> Outcome:
    """Complete deliveries of every layout that is there, and what is wrong with the others.

    Plain files count only where nothing else is there: beside an export they are not the provider's.

    Args:
        source: for bytes, sizes, times and tags.
        files: path in the file system by name below the source's URL.
        alone: the URL is one file.
    """
    exports = {rel: match for rel in files if (match := EXPORT.fullmatch(rel))}
    runs = {rel: match for rel in files if rel not in exports and (match := RUN.fullmatch(rel))}
    rest = [rel for rel in files if rel not in exports and rel not in runs and rel.lower().endswith(".parquet")]
    sets = {rel: match for rel in rest if not _hidden(rel) and (match := SET.fullmatch(rel))}
    if not (exports or runs or sets):
        return _plain(source, files, alone=alone)
    candidates: list[Candidate] = []
    problems: list[DeliveryError] = []
    for found, wrong in (_exports(source, files, exports), _runs(source, files, runs), _sets(source, files, sets)):
        candidates += found
        problems += wrong
    return candidates, problems


def _plain(source: Files, files: Mapping[str, str], *, alone: bool) -> Outcome:
    names = [n for n in files if alone or (n.lower().endswith(PLAIN_FILES) and not _hidden(n))]
    if not names:
        raise source.refuse(
            source.url,
            f"no bill among {len(files)} file(s) at {source.url}; expected {', '.join(PLAIN_FILES)}",
            "Correct bills.url of the source in the settings.",
        )
    return [
        Candidate(shown(n), shown(n), source.modified(files[n]), True, None, source.tagged([files[n]])) for n in names
    ], []


# --- AWS Data Exports ------------------------------------------------------------------------------------------------


def _exports(source: Files, files: Mapping[str, str], exports: Mapping[str, re.Match[str]]) -> Outcome:
    """Every folder of a period; parts and manifests are matched within one export."""
    data: dict[tuple[str, str], dict[str, str]] = {}
    manifests: dict[tuple[str, str], list[str]] = {}
    for rel, match in exports.items():
        place = (match["export"], match["period"])
        rest = match["rest"]
        if match["kind"].lower() == "data" and not _hidden(rest):
            data.setdefault(place, {})[rest] = files[rel]
        elif match["kind"].lower() == "metadata" and rest.lower().endswith(MANIFEST):
            manifests.setdefault(place, []).append(rel)
    candidates: dict[tuple[str, ...], Candidate] = {}
    problems: list[DeliveryError] = []
    for place in sorted({*data, *manifests}):
        parts, named = data.get(place, {}), set[str]()
        group = shown(f"{place[0]}BILLING_PERIOD={place[1]}")
        first = len(problems)
        for rel in manifests.get(place, []):
            try:
                rests = _export_parts(source, rel, files[rel], parts)
            except DeliveryError as error:
                problems.append(error)
                continue
            named.update(rests)
            paths = tuple(parts[r] for r in rests)
            main = "/" not in exports[rel]["rest"]
            if main or paths not in candidates:
                at = _execution_time(rests) or source.modified(files[rel])
                candidates[paths] = Candidate(shown(rel), group, at, main, place[1], source.tagged(paths))
        problems += _unannounced(source, place, parts, named, bool(manifests.get(place)))
        for problem in problems[first:]:
            problem.facts["group"] = group
    return list(candidates.values()), problems


def _export_parts(source: Files, rel: str, path: str, parts: Mapping[str, str]) -> list[str]:
    """Parts that a manifest names, below its period's data folder, sorted; all of them are there."""
    try:
        uris = json.loads(source.fetch(path))["dataFiles"]
        if not isinstance(uris, list) or not all(isinstance(u, str) for u in uris):
            raise TypeError("dataFiles is no list of URIs")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise source.refuse(
            rel,
            f"not a manifest of AWS Data Exports: {error!r}; expected JSON with dataFiles",
            "Wait for the next export.",
        ) from error
    rests = [match["rest"] if (match := EXPORT.fullmatch(uri)) else uri for uri in uris]
    _refuse_twice(source, rel, rests)
    missing = [uri for uri, rest in zip(uris, rests, strict=True) if rest not in parts]
    if missing or not uris:
        what = f"part {missing[0]} is missing" if missing else "it names no part"
        raise source.refuse(
            rel,
            f"the delivery is incomplete: {what} ({len(uris) - len(missing)} of {len(uris)} parts are there)",
            "Wait until the export has delivered all parts, or export the period again.",
            part=missing[0] if missing else None,
        )
    return sorted(rests)


def _refuse_twice(source: Files, rel: str, parts: Sequence[str], **facts: Any) -> None:
    """A part that a manifest names twice would be billed twice."""
    again = next((part for number, part in enumerate(parts) if part in parts[:number]), None)
    if again is not None:
        problem = f"it names part {again} {parts.count(again)} times; expected each part once"
        raise source.refuse(rel, problem, "Run the export again.", part=again, **facts)


def _unannounced(
    source: Files, place: tuple[str, str], parts: Mapping[str, str], named: set[str], has_manifest: bool
) -> Iterator[DeliveryError]:
    """Parts of newer executions than any that a manifest names: their delivery is still under way."""
    folders = {_folder(rest) for rest in parts} - {_folder(rest) for rest in named}
    newest = max((_folder(rest) for rest in named), default="")
    for folder in sorted(folders):
        if folder > newest or not has_manifest:
            where = f"{place[0]}data/BILLING_PERIOD={place[1]}/{folder}".rstrip("/")
            yield source.refuse(
                where,
                "the delivery is incomplete: no manifest names its parts",
                "The export writes the manifest last: wait for it. The source's URL must hold metadata/ as well.",
            )


def _execution_time(rests: Sequence[str]) -> str | None:
    """UTC text of the execution folder that all parts are in, or None."""
    folders = {_folder(rest).rsplit("/", 1)[-1] for rest in rests}
    match = EXECUTION.fullmatch(folders.pop()) if len(folders) == 1 else None
    if match is None:
        return None
    year, month, day, hour, minute, second = match.groups()[:6]
    return f"{year}-{month}-{day}T{hour}:{minute}:{second}.{(match[7] or '').ljust(6, '0')}Z"


# --- Azure exports ---------------------------------------------------------------------------------------------------


def _runs(source: Files, files: Mapping[str, str], runs: Mapping[str, re.Match[str]]) -> Outcome:
    """Runs by export and days; what is wrong with a run older than the newest whole one does not matter."""
    folders: dict[str, dict[str, list[str]]] = {}
    for rel, match in runs.items():
        if not _hidden(match["rest"]):
            group = f"{match['export']}{match['span']}"
            folders.setdefault(group, {}).setdefault(_folder(rel), []).append(rel)
    candidates: list[Candidate] = []
    problems: list[DeliveryError] = []
    for group, by_folder in sorted(folders.items()):
        whole: list[tuple[Candidate, str]] = []
        wrong: list[tuple[DeliveryError, str]] = []
        for folder, rels in sorted(by_folder.items()):
            manifest = f"{folder}/{MANIFEST}"
            if manifest in rels:
                at = source.modified(files[manifest])
                try:
                    whole.append((_run(source, files, manifest, group, at), at))
                except DeliveryError as error:
                    wrong.append((error, at))
            elif any(rel.lower().endswith(PLAIN_FILES) for rel in rels):
                at = max(source.modified(files[rel]) for rel in rels)
                then = "The export writes the manifest last: wait for it, or run the export again."
                lacking = "the delivery is incomplete: it has no manifest.json"
                wrong.append((source.refuse(folder, lacking, then), at))
        newest = max(whole, key=lambda one: one[0].delivered_at, default=None)
        for problem, at in wrong:
            submitted = problem.facts.get("submitted")
            if newest is None or (submitted > newest[0].delivered_at if submitted else at > newest[1]):
                problem.facts["group"] = shown(group)
                problems.append(problem)
        candidates += [one for one, _ in whole]
    return candidates, problems


def _run(source: Files, files: Mapping[str, str], rel: str, group: str, modified: str) -> Candidate:
    """The delivery of one run: every part that its manifest names is there, with its bytes.

    Raises:
        DeliveryError: the manifest is none of a FOCUS export, or a part is missing or cut; carries submitted.
    """
    submitted = None
    try:
        body = json.loads(source.fetch(files[rel]).decode("utf-8-sig"))
        config, info, blobs = body["exportConfig"], body["runInfo"], body["blobs"]
        submitted = _instant(info.get("submittedTime"))
        names = [str(blob["blobName"]) for blob in blobs]
        sizes = [blob.get("byteCount") for blob in blobs]
        counts = (body.get("blobCount"), body.get("byteCount"), body.get("dataRowCount"))
        if any(n is not None and not isinstance(n, int) for n in (*sizes, *counts)):
            raise TypeError("a count that is no whole number")
        begins = _first_day(info.get("startDate"))
        kind, frame = config.get("type"), config.get("timeFrame")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise source.refuse(
            rel,
            f"not a manifest of an Azure export: {error!r}; expected JSON with exportConfig, runInfo and blobs",
            "Wait for the next run, or run the export again.",
            submitted=submitted,
        ) from error
    if kind != FOCUS_TYPE:
        then = "Let the source's URL hold the export of cost and usage details in FOCUS form alone."
        raise source.refuse(rel, f"an export of type {kind!r}; expected {FOCUS_TYPE}", then, submitted=submitted)
    if frame is not None and frame not in WHOLE_FRAMES:
        then = "Each run replaces the one before: export the month to date."
        raise source.refuse(
            rel, f"time frame {frame!r}; expected one of {', '.join(WHOLE_FRAMES)}", then, submitted=submitted
        )
    _refuse_twice(source, rel, names, submitted=submitted)
    parts = [_part(source, files, rel, name, size, submitted) for name, size in zip(names, sizes, strict=True)]
    _check_counts(source, rel, counts, [source.size(path) for path in parts], submitted)
    at = submitted or modified
    return Candidate(shown(rel), shown(group), at, True, None, source.tagged(sorted(parts)), counts[2], begins)


def _part(source: Files, files: Mapping[str, str], rel: str, blob: str, size: int | None, submitted: str | None) -> str:
    """Path of a part: in its manifest's folder, under the name that the manifest gives from the container's root."""
    own = f"{_folder(rel)}/{blob.rpartition('/')[2]}"
    same = f"/{blob}".endswith(f"/{own}") or f"/{own}".endswith(f"/{blob}")
    found = source.size(files[own]) if same and own in files else None
    if not same or own not in files:
        problem = f"part {blob} is missing"
    elif size is not None and found is not None and found != size:
        problem = f"part {blob} has {found:,} bytes, and the manifest says {size:,}"
    else:
        return files[own]
    raise source.refuse(
        rel,
        f"the delivery is incomplete: {problem}",
        "Wait until the run has delivered all parts, or run the export again.",
        part=blob,
        submitted=submitted,
    )


def _check_counts(
    source: Files,
    rel: str,
    counts: tuple[int | None, int | None, int | None],
    sizes: Sequence[int | None],
    submitted: str | None,
) -> None:
    blobs, size, _ = counts
    total = None if None in sizes else sum(s for s in sizes if s is not None)
    if not sizes:
        problem = "it names no part"
    elif blobs is not None and blobs != len(sizes):
        problem = f"it promises {blobs} part(s) and names {len(sizes)}"
    elif size is not None and total is not None and size != total:
        problem = f"it promises {size:,} bytes, and its parts have {total:,}"
    else:
        return
    then = "Wait until the run has delivered all parts, or run the export again."
    raise source.refuse(rel, f"the delivery is incomplete: {problem}", then, submitted=submitted)


def _instant(text: Any) -> str | None:
    """Sortable UTC text with microseconds, like times of modification."""
    ns = parse_instant(text) if isinstance(text, str) else None
    if ns is None:
        return None
    return f"{instant_text(ns // 10**9 * 10**9).removesuffix('Z')}.{ns % 10**9 // 1000:06d}Z"


def _first_day(text: Any) -> date | None:
    return date.fromisoformat(text[:10]) if isinstance(text, str) and text else None


# --- sets of Parquet files -------------------------------------------------------------------------------------------


def _sets(source: Files, files: Mapping[str, str], sets: Mapping[str, re.Match[str]]) -> Outcome:
    """All files of a period's folder are one delivery: rows that come late are a further file, and a new state of the set."""
    groups: dict[tuple[str, str], list[str]] = {}
    deeper: dict[tuple[str, str], str] = {}
    for rel, match in sets.items():
        place = (match["export"], match["period"])
        groups.setdefault(place, []).append(rel)
        if "/" in match["rest"]:
            deeper[place] = match["rest"]
    candidates: list[Candidate] = []
    problems: list[DeliveryError] = []
    for place, rels in sorted(groups.items()):
        group = shown(f"{place[0]}BILLING_PERIOD={place[1]}")
        if place in deeper:
            then = "Keep the period's files beside one another: folders could hold several states of them."
            found = f"folders below a set of files ({deeper[place]}); expected files alone"
            problems.append(source.refuse(group, found, then, group=group))
            continue
        paths = [files[rel] for rel in sorted(rels)]
        at = max(source.modified(path) for path in paths)
        candidates.append(Candidate(group, group, at, True, place[1], source.tagged(paths), announced=False))
    return candidates, problems


def _hidden(name: str) -> bool:
    return any(part.startswith((".", "_")) for part in name.split("/"))


def _folder(rest: str) -> str:
    return rest.rpartition("/")[0]
