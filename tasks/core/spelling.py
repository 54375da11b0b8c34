"""One spelling of resource ids where a cloud compares them without regard to case and its bill varies in it.

Addresses keep what the bill says; whatever groups them by resource groups by this. Source: infra/rules/ledger.md 7.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc


def one_spelling(table: pa.Table) -> pa.Table:
    """The table with ResourceId in lower case where x_Cloud is azure; other clouds' ids are as they stand."""
    at, resource = table.column_names.index("ResourceId"), table["ResourceId"].cast(pa.string())
    is_azure = pc.equal(table["x_Cloud"].cast(pa.string()), "azure")
    return table.set_column(at, "ResourceId", pc.if_else(is_azure, pc.utf8_lower(resource), resource))
