"""The flows. Prefect reads its environment when it is first imported, so what holds for every run is said here.

No analytics: neither the client nor a temporary server reports anything. What the shell sets stands.
"""

import os

_QUIET = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
}
for _name, _value in _QUIET.items():
    os.environ.setdefault(_name, _value)
