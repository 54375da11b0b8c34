"""The verify flow: hold every committed day to its objects and to its reports."""

from __future__ import annotations

import sys

from flows.maintain import as_dict, tell, verify
from flows.params import Verify
from flows.shell import main

if __name__ == "__main__":
    sys.exit(main(verify, Verify, "verify", for_programs=as_dict, for_people=tell))
