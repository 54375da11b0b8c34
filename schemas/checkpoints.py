"""What lies in checkpoint folders, and what moving it would save. Source: infra/rules/tiers.md."""

from dataclasses import replace

from seedance.schema import INSTANT, MONEY, Column, Table, number, text

TIERS = ("hot", "warm", "cold", "expired")
PINS = ("legal_hold", "best", "final")
VERDICTS = ("move", "keep")


def _usd(name: str, about: str, *, null: bool = False) -> Column:
    return Column(name, MONEY, about, unit="BillingCurrency", null=null, summed=True)


_ROOT = text("x_Folder", "checkpoint folder: a path or a URL")
_PATH = text("x_Path", "path below the folder; bytes that are not UTF-8 are written as \\x…")
_BYTES = number("x_Bytes", 64, "bytes", "size", null=True)
_JOB = text("x_JobId", "job, from the path; null where the policy states no pattern, or it does not fit", null=True)
_STEP = number("x_Step", 64, "count", "training step, from the path", null=True, summed=False)
_CLASS = text(
    "x_StorageClass", "storage class where it lies, as the price table names it, else as the store does", null=True
)
_CURRENCY = text("BillingCurrency", "currency of the amounts")

FOUND = Table(
    "core_checkpoints__found",
    "one entry of a checkpoint folder as the listing has it",
    ("x_Path",),
    (
        _PATH,
        _BYTES,
        Column("x_ModifiedUtc", INSTANT, "last modification, by the store", unit="ns UTC", null=True),
        Column(
            "x_AccessedUtc",
            INSTANT,
            "last access; null where the store has none or it is not later than the modification",
            unit="ns UTC",
            null=True,
        ),
        text("x_ApiClass", "storage class as the store's API names it; null on local disk", null=True),
        text(
            "x_Checksum",
            "checksum that the store keeps; never an ETag, which need not be a hash of the content",
            null=True,
        ),
        text("x_ChecksumKind", "algorithm, and `of parts` where it is no hash of the whole object", null=True),
        text("x_Problem", "why the entry cannot be used; it is listed and never moved", null=True),
    ),
)

INVENTORY = Table(
    "report_checkpoints__inventory",
    "one entry of a checkpoint folder on a day",
    ("x_Folder", "x_Path"),
    (
        _ROOT,
        *(c for c in FOUND.columns if c.name not in ("x_ApiClass",)),
        _JOB,
        _STEP,
        _CLASS,
        number("x_AgeDays", 32, "days", "whole days since it was last written or read", null=True, summed=False),
        text("x_Pin", "why it stays where it is, whatever its age", null=True, values=PINS),
        text(
            "x_Tier", "what the policy makes of it; null for pinned and for unusable entries", null=True, values=TIERS
        ),
        _usd("x_CostPerMonth", "storage of a month at list price; null where the price is not known", null=True),
        _CURRENCY,
    ),
)

MOVES = Table(
    "report_checkpoints__moves",
    "one entry that the policy wants in another class, with what moving it would save and cost",
    ("x_Folder", "x_Path"),
    (
        _ROOT,
        _PATH,
        replace(_BYTES, null=False),
        _JOB,
        _STEP,
        text("x_Tier", "what the policy makes of it", values=TIERS),
        replace(_CLASS, name="x_FromClass"),
        text("x_ToClass", "class that the policy wants"),
        number("x_AgeDays", 32, "days", "whole days since it was last written or read", summed=False),
        number("x_StayDays", 32, "days", "days that the policy would keep it there", summed=False),
        _usd("x_SavedPerMonth", "storage of a month, before minus after; null where a price is not known", null=True),
        _usd("x_Saved", "the same over the stay", null=True),
        _usd("x_RequestCost", "requests of the move, and of the expected reads beside those of now", null=True),
        _usd("x_RetrievalCost", "retrieval of the move, and of the expected reads beside those of now", null=True),
        _usd(
            "x_MinimumCost",
            "what minimum durations charge: for leaving early now, and for leaving there early",
            null=True,
        ),
        _usd("x_Net", "saved minus the three costs", null=True),
        _CURRENCY,
        text("x_Verdict", "move when it pays, else keep", values=VERDICTS),
        text("x_Why", "of keep: why", null=True),
    ),
)

CHECKPOINTS = {t.name: t for t in (INVENTORY, MOVES)}
