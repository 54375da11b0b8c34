"""The rebuild flow: a new lake from what another one keeps in raw/."""

from __future__ import annotations

import sys

from flows.maintain import as_dict, rebuild, tell
from flows.params import Rebuild
from flows.shell import main

if __name__ == "__main__":
    sys.exit(main(rebuild, Rebuild, "rebuild", for_programs=as_dict, for_people=tell))
