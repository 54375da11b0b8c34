"""Tie rules: class, rule, machine, dependant and instance type from the row alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from seedance.catalogue import gpu_instances
from seedance.schema import MONEY
from tasks.core import focus, ties
from tasks.core.focus_values import Place
from tasks.errors import SettingsError
from tests.bills import row, text_table

FILE = Path(__file__).resolve().parents[2] / "tasks" / "rules" / "ties.csv"
RULES = ties.parse_rules(FILE.read_text(encoding="utf-8"), where="ties.csv")
EC2 = "Amazon Elastic Compute Cloud"
VM = "/subscriptions/S1/resourceGroups/RG/providers/Microsoft.Compute/virtualMachines/Gpu-1"
SET = "/subscriptions/s1/resourcegroups/rg/providers/microsoft.compute/virtualmachinescalesets/pool"
GCE = "//compute.googleapis.com/projects/p/zones/z/instances/1234567890123456789"


def tied(**changes: str) -> dict[str, Any]:
    blank = dict.fromkeys(
        ("x_UsageType", "SkuPriceDetails", "SkuMeter", "x_SkuDetails", "x_SystemLabels", "x_Credits"), ""
    )
    rows = focus.normalise(text_table([{**blank, **row(**changes)}]), Place("aws", "x")).rows
    (found,) = ties.tie(rows, RULES, gpu_instances()).to_pylist()
    return dict(found)


def azure(**changes: str) -> dict[str, Any]:
    facts = {"ProviderName": "Microsoft", "ServiceName": "Virtual Machines", "ChargeDescription": "", "ResourceId": VM}
    return tied(**{**facts, **changes})


def gcp(**changes: str) -> dict[str, Any]:
    facts = {
        "ProviderName": "Google Cloud",
        "ServiceName": "Compute Engine",
        "ChargeDescription": "",
        "ResourceId": GCE,
    }
    return tied(**{**facts, **changes})


@pytest.mark.parametrize(
    ("facts", "type_found"),
    [
        ({}, "g5.4xlarge"),
        ({"ChargeDescription": "p4d.24xlarge Linux/UNIX Spot Instance-hour in US East (Virginia)"}, "p4d.24xlarge"),
        ({"ChargeDescription": "", "x_UsageType": "USW2-BoxUsage:p5.48xlarge"}, "p5.48xlarge"),
        ({"ChargeDescription": "", "x_UsageType": "EU-SpotUsage:g4dn.metal"}, "g4dn.metal"),
        ({"ChargeDescription": "", "x_UsageType": "DedicatedUsage:p6-b200.48xlarge"}, "p6-b200.48xlarge"),
        ({"SkuPriceDetails": '{"InstanceType": "G6e.XLARGE"}'}, "g6e.xlarge"),
        ({"SkuPriceDetails": '{"InstanceType": "p9.huge"}'}, "p9.huge"),
        ({"ResourceId": "arn:aws:ec2:us-east-1:1:instance/i-0aaaabbbbccccdddd"}, "g5.4xlarge"),
        ({"ResourceId": "arn:aws:ec2:us-east-1:1:instance/I-0AAAABBBBCCCCDDDD"}, "g5.4xlarge"),
        ({"ConsumedUnit": "", "PricingUnit": ""}, "g5.4xlarge"),
        ({"ServiceName": "AmazonEC2", "ConsumedUnit": "Hrs"}, "g5.4xlarge"),
        ({"BilledCost": "-1.624", "ChargeCategory": "Credit"}, "g5.4xlarge"),
    ],
)
def test_gpu_instance_rows_are_machines(facts: dict[str, str], type_found: str) -> None:
    found = tied(**facts)
    assert (found["x_Class"], found["x_TieRule"]) == ("machine", "aws-gpu-instance")
    assert found["x_MachineId"] == "i-0aaaabbbbccccdddd"
    assert found["x_InstanceType"] == type_found


@pytest.mark.parametrize(
    "facts",
    [
        {"ChargeDescription": "$0.111 per On Demand Linux m5.large Instance Hour"},
        {"ChargeDescription": "$0.00 for 4750 Mbps per g5.4xlarge instance-hour (or partial hour)"},
        {"x_UsageType": "EBSOptimized:g5.4xlarge"},
        {"x_UsageType": "USE1-DataTransfer-Out-Bytes", "SkuPriceDetails": '{"InstanceType": "g5.4xlarge"}'},
        {"ChargeDescription": "$0.09 per GB - data transfer out", "ConsumedUnit": "GB"},
        {"ChargeDescription": "", "x_UsageType": "BoxUsage:trn1.32xlarge"},
        {"ChargeDescription": "", "x_UsageType": "BoxUsage:inf2.xlarge"},
        {"ChargeDescription": "", "x_UsageType": "BoxUsage:p1.large"},
    ],
)
def test_other_rows_that_name_an_instance_are_not_machines_but_name_it(facts: dict[str, str]) -> None:
    found = tied(**facts)
    assert found["x_Class"] == "untied"
    assert found["x_MachineId"] == "i-0aaaabbbbccccdddd"


def test_unused_capacity_names_no_machine() -> None:
    arn = "arn:aws:ec2:us-east-1:1:capacity-reservation/cr-0aaaabbbbccccdddd"
    found = tied(ChargeDescription="", x_UsageType="UnusedBox:p5.48xlarge", ResourceId=arn)
    assert (found["x_Class"], found["x_MachineId"], found["x_InstanceType"]) == ("untied", None, "p5.48xlarge")


@pytest.mark.parametrize(
    ("facts", "kind", "dependant"),
    [
        ({"ResourceId": "vol-0aaaabbbbccccdddd"}, "dependant", "vol-0aaaabbbbccccdddd"),
        ({"ResourceId": "arn:aws:ec2:us-east-1:1:volume/vol-0aaaabbbbccccdddd"}, "dependant", "vol-0aaaabbbbccccdddd"),
        ({"ResourceId": "vom-0l8a4f3l22el48327", "ResourceType": "volume"}, "dependant", "vom-0l8a4f3l22el48327"),
        ({"ResourceId": "", "x_UsageType": "EBS:VolumeUsage.gp3"}, "dependant", None),
        ({"ResourceId": "eipalloc-0aaaabbbb", "ServiceName": "AmazonVPC"}, "dependant", "eipalloc-0aaaabbbb"),
        ({"ResourceId": "arn:aws:ec2:x:1:network-interface/eni-0aaaabbbb"}, "dependant", "eni-0aaaabbbb"),
        ({"ResourceId": "arn:aws:ec2:x:1:natgateway/nat-0aaaabbbb"}, "dependant", "nat-0aaaabbbb"),
        (
            {"ResourceId": "arn:aws:elb:x:1:loadbalancer/app/web/1", "ServiceName": "Elastic Load Balancing"},
            "dependant",
            "arn:aws:elb:x:1:loadbalancer/app/web/1",
        ),
        (
            {"ResourceId": "arn:aws:ec2:x:1:natgateway/nat-0aaaabbbb", "x_UsageType": "USW2-NatGateway-Hours"},
            "shared",
            None,
        ),
        (
            {"ResourceId": "arn:x:natgateway/nat-0aaaabbbb", "ChargeDescription": "$0.045 per NAT Gateway Hour"},
            "shared",
            None,
        ),
        ({"ResourceId": "arn:aws:ec2:x:1:snapshot/snap-0aaaabbbb"}, "storage", None),
        ({"ResourceId": "bucket", "ServiceName": "Amazon Simple Storage Service"}, "storage", None),
        ({"ResourceId": "fs-1", "ServiceName": "AmazonFSx"}, "storage", None),
        ({"ResourceId": "arn:c", "ServiceName": "AmazonEKS"}, "shared", None),
        ({"ResourceId": "", "ServiceName": "AWS Premium Support"}, "support", None),
        ({"ResourceId": "", "ServiceName": "AWSSupportBusiness"}, "support", None),
        ({"ResourceId": "", "ChargeDescription": "Promotional Credits"}, "untied", None),
        (
            {"ResourceId": "arn:q", "ServiceName": "Amazon Simple Queue Service", "ChargeDescription": "x"},
            "other",
            None,
        ),
        (
            {
                "ServiceName": "x",
                "ResourceId": "",
                "ChargeCategory": "Adjustment",
                "ChargeDescription": "RoundingAdjustment",
            },
            "rounding",
            None,
        ),
    ],
)
def test_aws_rows_beside_machines(facts: dict[str, str], kind: str, dependant: str | None) -> None:
    found = tied(**{"ChargeDescription": "", **facts})
    assert (found["x_Class"], found["x_DependantId"]) == (kind, dependant)
    assert (found["x_TieRule"] is None) == (kind == "other")
    assert found["x_MachineId"] is None


def test_azure_rows() -> None:
    gpu = '{"InstanceType": "standard_nd96isr_h100_v5"}'
    found = azure(SkuPriceDetails=gpu)
    assert (found["x_Class"], found["x_MachineId"]) == ("machine", VM.lower())
    assert found["x_InstanceType"] == "Standard_ND96isr_H100_v5"
    assert azure(SkuPriceDetails='{"InstanceType": "Standard_D4s_v5"}')["x_Class"] == "untied"
    member = azure(SkuPriceDetails=gpu, ResourceId=f"{SET}/virtualMachines/3")
    assert (member["x_Class"], member["x_MachineId"]) == ("machine", f"{SET}/virtualmachines/3")
    whole_set = azure(SkuPriceDetails=gpu, ResourceId=SET)
    assert (whole_set["x_Class"], whole_set["x_MachineId"]) == ("untied", None)
    disk = azure(ResourceId="/subscriptions/S1/resourceGroups/RG/providers/Microsoft.Compute/disks/D1")
    assert disk["x_DependantId"] == "/subscriptions/s1/resourcegroups/rg/providers/microsoft.compute/disks/d1"
    assert azure(ServiceName="Storage Accounts", ResourceId="/x")["x_Class"] == "storage"


def test_gcp_rows() -> None:
    found = gcp(SkuPriceDetails='{"InstanceType": "a3-highgpu-8g"}')
    assert (found["x_Class"], found["x_MachineId"]) == ("machine", GCE)
    assert gcp(SkuPriceDetails='{"InstanceType": "e2-standard-4"}')["x_Class"] == "untied"
    assert gcp(ResourceId="//compute.googleapis.com/projects/p/zones/z/disks/d")["x_Class"] == "dependant"
    assert gcp(ServiceName="Cloud Storage", ResourceId="//b")["x_Class"] == "storage"


A100 = '{"ServiceType": "Standard_NC24ads_A100_v4", "VMName": "Pool_12"}'


@pytest.mark.parametrize(
    ("facts", "machine"),
    [
        ({"x_SkuDetails": A100, "ResourceId": SET}, f"{SET}/virtualmachines/12"),
        ({"x_SkuDetails": A100, "ResourceId": SET.upper()}, f"{SET}/virtualmachines/12"),
        (
            {
                "SkuPriceDetails": '{"x_ServiceType": "standard_nc24ads_a100_v4", "x_VMName": "pool_0"}',
                "ResourceId": SET,
            },
            f"{SET}/virtualmachines/0",
        ),
        ({"x_SkuDetails": A100, "ResourceId": f"{SET}2"}, None),
        ({"x_SkuDetails": A100.replace("Pool_12", "Pool"), "ResourceId": SET}, None),
        ({"x_SkuDetails": A100, "ResourceId": VM}, VM.lower()),
    ],
)
def test_machines_of_azure_scale_sets(facts: dict[str, str], machine: str | None) -> None:
    found = azure(**facts)
    assert found["x_MachineId"] == machine
    assert found["x_Class"] == ("untied" if machine is None else "machine")
    assert found["x_InstanceType"] == "Standard_NC24ads_A100_v4"


def test_licences_are_billed_beside_machines() -> None:
    found = azure(
        SkuPriceDetails='{"InstanceType": "Standard_NC24ads_A100_v4"}', ServiceName="Virtual Machines Licenses"
    )
    assert (found["x_Class"], found["x_TieRule"], found["x_MachineId"]) == (
        "untied",
        "azure-licence-service",
        VM.lower(),
    )
    found = gcp(ChargeDescription="Licensing Fee for RHEL on VM with 6 to 127 VCPU", SkuPriceDetails=A3)
    assert (found["x_Class"], found["x_TieRule"], found["x_MachineId"]) == ("untied", "gcp-licence", GCE)


A3 = '{"InstanceType": "a3-highgpu-8g"}'


@pytest.mark.parametrize(
    ("text", "unit", "rule", "units"),
    [
        ("A3 Instance Core running in Americas", "hour", "gcp-gpu-core", 208),
        ("Spot Preemptible A3 Instance Ram running in Americas", "byte-seconds", "gcp-gpu-ram", 1872),
        ("A3 Instance Ram running in Americas", "GiBy.h", "gcp-gpu-ram", 1872),
        ("Nvidia H100 80GB GPU attached to Spot Preemptible VMs", "seconds", "gcp-gpu-gpu", 8),
        ("a3-highgpu-8g running", "Hours", "gcp-gpu-machine", None),
        ("SSD backed Local Storage", "gibibyte month", "gcp-machines", None),
        ("Network Internet Egress", "bytes", "gcp-machines", None),
        ("Program to ramp cored graphs", "bytes", "gcp-machines", None),
    ],
)
def test_meters_of_a_gcp_machine(text: str, unit: str, rule: str, units: int | None) -> None:
    for facts in ({"ChargeDescription": text}, {"SkuMeter": text}):
        found = gcp(ConsumedUnit=unit, SkuPriceDetails=A3, **facts)
        assert (found["x_TieRule"], found["x_UnitsPerMachine"], found["x_MachineId"]) == (rule, units, GCE)
        assert found["x_Class"] == ("untied" if rule == "gcp-machines" else "machine")


def test_of_a_type_that_the_catalogue_does_not_have_the_units_are_unknown_and_not_one() -> None:
    found = gcp(ChargeDescription="A9 Instance Core", SkuPriceDetails='{"InstanceType": "a9-huge-8g"}')
    assert (found["x_TieRule"], found["x_UnitsPerMachine"]) == ("gcp-gpu-core", 0)


@pytest.mark.parametrize("label", ['"true"', '["true","true"]', '"True"', "true"])
def test_a_reservation_that_nobody_used_is_told_by_its_label(label: str) -> None:
    """Google says it in a system label and leaves CapacityReservationStatus empty."""
    labels = f'{{"compute.googleapis.com/is_unused_reservation":{label},"compute.googleapis.com/cores":"12"}}'
    reserved = "//compute.googleapis.com/projects/p/zones/z/reservations/gpu"
    for resource in (reserved, "", GCE):
        found = gcp(
            ChargeDescription="A3 Instance Core", SkuPriceDetails=A3, ResourceId=resource, x_SystemLabels=labels
        )
        assert (found["x_Class"], found["x_TieRule"]) == ("capacity_unused", "gcp-capacity-unused")
    false = labels.replace("true", "false").replace("True", "false")
    assert gcp(ChargeDescription="A3 Instance Core", SkuPriceDetails=A3, x_SystemLabels=false)["x_Class"] == "machine"


@pytest.mark.parametrize("column", ["x_SkuDetails", "SkuPriceDetails", "Tags"])
def test_an_azure_reservation_that_nobody_used_is_told_by_its_resource(column: str) -> None:
    """A used hour stands on the machine and names the reservation in its details; an unused one on the reservation."""
    base = "/subscriptions/S1/resourceGroups/RG/providers/Microsoft.Compute"
    reserved = f"{base}/capacityReservationGroups/G/capacityReservations/R"
    details = json.dumps({"VMCapacityReservationId": reserved, "ServiceType": "Standard_NC24ads_A100_v4"})
    for resource in (reserved, reserved.lower()):
        found = azure(ResourceId=resource, **{column: details})
        assert (found["x_Class"], found["x_MachineId"]) == ("capacity_unused", None)
    if column == "x_SkuDetails":
        assert azure(**{column: details})["x_Class"] == "machine"


def test_the_type_of_a_gcp_machine_can_stand_in_a_system_label() -> None:
    found = gcp(ChargeDescription="x", x_SystemLabels='{"compute.googleapis.com/machine_spec": "a3-highgpu-8g"}')
    assert (found["x_InstanceType"], found["x_TieRule"]) == ("a3-highgpu-8g", "gcp-gpu-machine")
    found = gcp(SkuPriceDetails=A3, x_SystemLabels='{"compute.googleapis.com/machine_spec": "g2-standard-4"}')
    assert found["x_InstanceType"] == "a3-highgpu-8g"


def test_a_fee_less_what_was_used_of_it_is_unused_commitment() -> None:
    offset = '[{"type": "FEE_UTILIZATION_OFFSET", "amount": -3}, {"type": "DISCOUNT", "amount": -1}]'
    facts = {"ChargeCategory": "Purchase", "CommitmentDiscountId": "cud", "ResourceId": ""}
    assert gcp(**facts, x_Credits=offset)["x_Class"] == "commitment_unused"
    assert gcp(**facts)["x_Class"] == "untied"
    assert gcp(**{**facts, "ChargeCategory": "Usage"}, x_Credits=offset)["x_Class"] == "untied"


def test_an_empty_table_is_tied() -> None:
    rows = focus.normalise(text_table([row()]), Place("aws", "x")).rows
    assert ties.tie(rows.slice(0, 0), RULES, gpu_instances()).column_names == list(ties.RESULT)


def test_the_first_rule_wins_and_every_class_has_a_rule() -> None:
    names = [r.name for r in RULES]
    assert len(set(names)) == len(names)
    assert {r.kind for r in RULES} == set(ties.CLASSES) - {"other"}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"class": "nonsense"}, "class among"),
        ({"cloud": ""}, "at least one condition"),
        ({"cloud": "(["}, "regular expression"),
        ({"cloud": "(?=x)"}, "regular expression"),
        ({"class": "dependant", "dependant": "no group"}, "one group"),
        ({"per": "disk"}, "per empty or among vcpu"),
        ({"about": "x,more"}, "20 fields"),
        ({"rule": "a,untied\na"}, "20 fields"),
    ],
)
def test_a_bad_rule_is_refused(changes: dict[str, str], expected: str) -> None:
    good = {**dict.fromkeys(ties.HEADER, ""), "rule": "a", "class": "untied", "cloud": "^aws$", "about": "x"}
    line = ",".join({**good, **changes}.values())
    with pytest.raises(SettingsError, match=expected) as caught:
        ties.parse_rules(",".join(ties.HEADER) + "\n" + line + "\n", where="ties.csv")
    assert caught.value.rule == "a"


def test_a_bad_header_is_refused() -> None:
    with pytest.raises(SettingsError, match="header"):
        ties.parse_rules("rule,class\n", where="ties.csv")


def test_columns_have_their_types() -> None:
    rows = focus.normalise(text_table([row()]), Place("aws", "x")).rows
    tied_rows = ties.tie(rows, RULES, gpu_instances())
    assert tied_rows.column_names == list(ties.RESULT)
    assert [f.type for f in tied_rows.schema] == [pa.string()] * 5 + [MONEY]
