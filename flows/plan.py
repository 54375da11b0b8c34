"""The plan flow: which days the next night would compute and why."""

from __future__ import annotations

import sys

from flows.maintain import as_dict, plan, tell
from flows.params import Plan
from flows.shell import main

if __name__ == "__main__":
    sys.exit(main(plan, Plan, "plan", for_programs=as_dict, for_people=tell))
