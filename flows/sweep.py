"""The sweep flow: take garbage out of the lake; a dry run unless told otherwise."""

from __future__ import annotations

import sys

from flows.maintain import as_dict, sweep, tell
from flows.params import Sweep
from flows.shell import main

if __name__ == "__main__":
    sys.exit(main(sweep, Sweep, "sweep", for_programs=as_dict, for_people=tell))
