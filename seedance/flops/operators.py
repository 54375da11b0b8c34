"""FLOPs of one call of an operator: the whole table behind one import.

The formulas are in the modules imported here; they register themselves. What has no
formula gives None: nobody may take it for free.
"""

from __future__ import annotations

from seedance.flops import attention_operators, convolution_operators, library_operators, matmul_operators  # noqa: F401
from seedance.flops.registry import Cost, cost, register, register_formula, signatures

__all__ = ["Cost", "cost", "register", "register_formula", "signatures"]
