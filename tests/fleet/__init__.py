"""A fleet that tells the truth: seeded telemetry, the bill that fits it, and the true address of every cent.

    spec = full_spec(seed=7, cloud="gcp")    # or tiny_spec, whole_spec, bundled_spec, FleetSpec(gap=True, …)
    fleet = build(spec)
    written = write_fleet(fleet, folder)     # shards, FOCUS export, second drop and delivery
    truth = true_ledger(fleet)               # addresses and layers, in integers of 1e-12

Shares no code with the pipeline: the rules of the ledger are written a second time, from what happened rather than from
what was recorded.
"""

from tests.fleet.bill import Charge, charge_label, charges, deliveries
from tests.fleet.model import Fleet, FleetSpec
from tests.fleet.observed import Layer, Place
from tests.fleet.roster import build
from tests.fleet.specs import (
    bundled_spec,
    bundled_specs,
    full_spec,
    random_spec,
    tiny_spec,
    whole_spec,
    with_switches,
)
from tests.fleet.timeline import Timeline, observe
from tests.fleet.truth import Address, LayerMoney, Truth, true_ledger, usage_days
from tests.fleet.write import Written, telemetry_files, truth_summary, write_fleet

__all__ = [
    "Address",
    "Charge",
    "Fleet",
    "FleetSpec",
    "Layer",
    "LayerMoney",
    "Place",
    "Timeline",
    "Truth",
    "Written",
    "build",
    "bundled_spec",
    "bundled_specs",
    "charge_label",
    "charges",
    "deliveries",
    "full_spec",
    "observe",
    "random_spec",
    "telemetry_files",
    "tiny_spec",
    "true_ledger",
    "truth_summary",
    "usage_days",
    "whole_spec",
    "with_switches",
    "write_fleet",
]
