"""The Prefect UI as people use it: server, worker and deployments are started, forms filled, runs seen, artifacts opened."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from playwright.sync_api import Page, expect

from flows.ui import healthy
from tests.browser.chromium import page
from tests.fleet import build, tiny_spec, write_fleet

ROOT = Path(__file__).resolve().parent.parent.parent
PATIENCE_S = 240
MISSED_NIGHTS = 3

pytestmark = pytest.mark.timeout(900)


@dataclass(frozen=True)
class Server:
    """A running server with its worker and deployments, and the folder that flows work on."""

    url: str
    folder: Path

    def api(self, path: str, body: object = None) -> Any:
        """An answer of the REST API; 503 (its SQLite file is locked) is asked again, as Prefect's own client does."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + "/api" + path, data, {"content-type": "application/json"})
        end = time.monotonic() + PATIENCE_S
        while True:
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    return json.load(answer)
            except urllib.error.HTTPError as error:
                if error.code != HTTPStatus.SERVICE_UNAVAILABLE or time.monotonic() > end:
                    raise
                time.sleep(1)

    def deployment(self, name: str) -> str:
        """Id of a deployment."""
        return str(self.api(f"/deployments/name/{name}/{name}")["id"])

    def run_named(self, name: str) -> Any:
        """The flow run of a name, or None while there is none."""
        found = self.api("/flow_runs/filter", {"flow_runs": {"name": {"any_": [name]}}})
        return found[0] if found else None

    def finished(self, name: str) -> Any:
        """The flow run of a name, when it has ended."""
        end = time.monotonic() + PATIENCE_S
        run = None
        while time.monotonic() < end:
            run = self.run_named(name)
            if run and run["state_type"] in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED"):
                return run
            time.sleep(1)
        raise AssertionError(f"{name} did not end within {PATIENCE_S} s: {run and run['state']}")

    def artifacts(self, run: Any) -> dict[str, Any]:
        """Artifacts of a flow run by key."""
        found = self.api("/artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [run["id"]]}}})
        return {a["key"]: a for a in found}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("ui")
    spec = tiny_spec()
    write_fleet(build(spec), folder)
    (folder / "seedance.toml").write_text(
        f'lake = "{folder / "lake"}"\ntelemetry = "telemetry"\nlook_back_days = 3660\nworkers = 1\nbuckets = 2\n'
        '[[bills]]\nname = "aws"\nurl = "bills/aws"\n'
    )
    assert spec.day < "2026-11"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {"PREFECT_HOME": str(folder / "prefect"), "PREFECT_WORKER_QUERY_SECONDS": "2"}
    environment.pop("PREFECT_API_URL", None)
    log = (folder / "ui.log").open("w")
    command = [sys.executable, "-m", "flows.ui", "--port", str(port)]
    child = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        end = time.monotonic() + PATIENCE_S
        while "stop with Ctrl-C" not in (folder / "ui.log").read_text():
            assert child.poll() is None and time.monotonic() < end, (folder / "ui.log").read_text()[-3000:]
            time.sleep(0.5)
        yield Server(f"http://127.0.0.1:{port}", folder)
    finally:
        child.send_signal(signal.SIGINT)
        time.sleep(1)
        child.send_signal(signal.SIGINT)  # by somebody in a hurry: the server must not be left behind
        assert child.wait(120) == 0, (folder / "ui.log").read_text()[-3000:]
        assert not healthy(f"http://127.0.0.1:{port}/api")
        log.close()


def form(shown: Page, server: Server, deployment: str, name: str) -> None:
    """Open the form of a deployment and name the run."""
    shown.goto(f"{server.url}/v2/deployments/deployment/{server.deployment(deployment)}")
    shown.get_by_role("button", name="Run", exact=True).click()
    shown.get_by_role("menuitem", name="Custom run").click()
    shown.wait_for_url("**/run?**")
    fields = {"Run Name": name, "Settings file (Optional)": str(server.folder / "seedance.toml")}
    end = time.monotonic() + PATIENCE_S
    while any(shown.get_by_label(label).input_value() != value for label, value in fields.items()):
        assert time.monotonic() < end, f"the form of {deployment} does not keep what is written"
        for label, value in fields.items():
            shown.get_by_label(label).fill(value)
        shown.wait_for_timeout(1_500)  # a page that is still loading draws the form anew, with a name of its own


def submit(shown: Page, server: Server, name: str) -> None:
    """Submit the form; a click that comes before the page has settled is repeated, as a person would."""
    end = time.monotonic() + PATIENCE_S
    while server.run_named(name) is None:
        assert time.monotonic() < end, f"no run {name}: {shown.inner_text('body')[-2000:]}"
        button = shown.get_by_role("button", name="Submit")
        if button.is_visible() and button.is_enabled():
            button.click()
        for _ in range(10):
            if server.run_named(name) is not None:
                return
            shown.wait_for_timeout(500)


def refused(shown: Page) -> None:
    """Submit a form that must not go through."""
    shown.get_by_role("button", name="Submit").click()


def picture(shown: Page, name: str) -> None:
    """A screenshot for people, where PICTURES names a folder."""
    folder = os.environ.get("PICTURES")
    if folder:
        shown.screenshot(path=Path(folder) / f"{name}.png", full_page=True)


def test_nightly_and_explain_through_their_forms(server: Server) -> None:
    with page(height=1400) as (shown, _):
        shown.set_default_timeout(60_000)
        form(shown, server, "nightly", "from-the-form")
        expect(shown.get_by_text("Newest UTC usage day to look at")).to_be_visible()
        picture(shown, "form-nightly")
        submit(shown, server, "from-the-form")
        run = server.finished("from-the-form")
        assert run["state_type"] == "COMPLETED", run["state"]["message"]
        assert (server.folder / "lake" / "days").is_dir()

        shown.goto(f"{server.url}/v2/runs/flow-run/{run['id']}")
        expect(shown.get_by_text("from-the-form").first).to_be_visible()
        expect(shown.get_by_text("Completed").first).to_be_visible()
        shown.get_by_role("tab", name="Artifacts").click()
        expect(shown.get_by_text("nightly-money").first).to_be_visible()
        artifacts = server.artifacts(run)
        shown.goto(f"{server.url}/v2/artifacts/artifact/{artifacts['nightly-money']['id']}")
        expect(shown.get_by_text("difference").first).to_be_visible()
        picture(shown, "artifact-money")
        rows = json.loads(artifacts["nightly-money"]["data"])
        assert [r["BilledCost"] for r in rows if r["category"] == "difference"] == ["0.000000000000"]
        shown.goto(f"{server.url}/v2/artifacts/artifact/{artifacts['nightly-run']['id']}")
        expect(shown.get_by_text("revision 1, first").first).to_be_visible()
        picture(shown, "artifact-run")

        job = first_job(server.folder)
        form(shown, server, "explain", "why")
        shown.get_by_label("Job (Optional)").fill(job)
        shown.get_by_role("button", name="Select Ledger").or_(shown.get_by_label("Ledger (Optional)")).first.click()
        shown.get_by_role("option", name="cash").click()
        picture(shown, "form-explain")
        submit(shown, server, "why")
        run = server.finished("why")
        assert run["state_type"] == "COMPLETED", run["state"]["message"]
        artifacts = server.artifacts(run)
        shown.goto(f"{server.url}/v2/artifacts/artifact/{artifacts['explain-tree']['id']}")
        expect(shown.get_by_text(job).first).to_be_visible()
        picture(shown, "artifact-explain")


def test_a_bad_value_is_told_in_the_form_and_in_the_run(server: Server) -> None:
    with page(height=1400) as (shown, _):
        shown.set_default_timeout(60_000)
        form(shown, server, "backfill", "no-day")
        refused(shown)
        expect(shown.get_by_text("'first_day' is a required property").first).to_be_visible()
        picture(shown, "form-required")
        form(shown, server, "explain", "too-deep")
        shown.get_by_label("Job (Optional)").fill("a")
        levels = shown.get_by_label("Levels (Optional)")
        levels.fill("99")
        refused(shown)
        told = str(levels.evaluate("field => field.validationMessage"))
        assert "8" in told, told
        assert "/run" in shown.url
        assert server.run_named("too-deep") is None
        form(shown, server, "explain", "two-questions")
        shown.get_by_label("Job (Optional)").fill("a")
        shown.get_by_label("Charge (Optional)").fill("b")
        submit(shown, server, "two-questions")
        run = server.finished("two-questions")
        assert run["state_type"] == "FAILED"
        assert "give exactly one of charge, job and resource" in run["state"]["message"]
        shown.goto(f"{server.url}/v2/runs/flow-run/{run['id']}")
        expect(shown.get_by_text("Failed").first).to_be_visible()
        picture(shown, "run-failed")


def test_missed_nights_are_caught_up_by_one_run(server: Server) -> None:
    nightly = server.deployment("nightly")
    names = [f"missed-{n}" for n in range(MISSED_NIGHTS)]
    parameters = {"params": {"settings": str(server.folder / "seedance.toml")}}
    for name in names:
        server.api(f"/deployments/{nightly}/create_flow_run", {"name": name, "parameters": parameters})
    states = [server.finished(name)["state_type"] for name in names]
    assert sorted(states) == ["CANCELLED"] * (MISSED_NIGHTS - 1) + ["COMPLETED"]


def first_job(folder: Path) -> str:
    """A job of the fleet, as its shards name it."""
    shard = next((folder / "telemetry" / "raw_telemetry__jobs").rglob("*.parquet"))
    return str(pq.read_table(shard)["job_id"][0])
