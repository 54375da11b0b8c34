"""What the three clouds call things: machine types by role, regions, accounts, and the ids of machines and volumes.

A machine has up to three spellings: the id by which the ledger knows it, what its agent states, and the resource that the
bill names. Knows no row of a bill and no telemetry. Sources: AWS ARNs; Azure resource ids; GCP full resource names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal

CLOUDS = ("aws", "azure", "gcp")
Token = Callable[..., str]
"""Stable hexadecimal digits of what is named: `token("machine", 3, digits=16)`."""


@dataclass(frozen=True)
class Profile:
    """One cloud.

    Args:
        types: instance type by role: train, serve, spot, dark, unbilled, mig, mps, fractions, second.
        region: region that its prices are of, as the catalogue and the bill spell it.
        account, sub_account: who pays and who uses; `second` is another payer with a currency of its own.
        spot_price: price of a spot hour before it moves, per hour.
        volume_type: type of a block volume, as its host and its list price name it.
        volume_rate: list price of the volume type, per GiB-month.
        service: what bills machine-hours.
    """

    cloud: str
    types: Mapping[str, str]
    region: str
    account: str
    sub_account: str
    second: tuple[str, str]
    spot_price: Decimal
    volume_type: str
    volume_rate: Decimal
    service: str


AWS = Profile(
    "aws",
    {
        "train": "g5.12xlarge",
        "serve": "g5.xlarge",
        "spot": "g4dn.12xlarge",
        "dark": "g5.2xlarge",
        "unbilled": "g4dn.xlarge",
        "mig": "p5.4xlarge",
        "mps": "g6.xlarge",
        "fractions": "g4dn.2xlarge",
        "second": "g4dn.xlarge",
    },
    "us-east-1",
    "111122223333",
    "444455556666",
    ("999988887777", "EUR"),
    Decimal("1.2875"),
    "gp3",
    Decimal("0.08"),
    "Amazon Elastic Compute Cloud",
)
AZURE = Profile(
    "azure",
    {
        "train": "Standard_NC96ads_A100_v4",
        "serve": "Standard_NC24ads_A100_v4",
        "spot": "Standard_NC64as_T4_v3",
        "dark": "Standard_NC8as_T4_v3",
        "unbilled": "Standard_NC4as_T4_v3",
        "mig": "Standard_NC48ads_A100_v4",
        "mps": "Standard_NC8as_T4_v3",
        "fractions": "Standard_NC16as_T4_v3",
        "second": "Standard_NC4as_T4_v3",
    },
    "eastus",
    "/providers/Microsoft.Billing/billingAccounts/1a2b3c4d-0000-4000-8000-000000000001",
    "/subscriptions/00000000-0000-4000-8000-000000000011",
    ("/providers/Microsoft.Billing/billingAccounts/1a2b3c4d-0000-4000-8000-000000000002", "EUR"),
    Decimal("1.7408"),
    "Premium_LRS",
    Decimal("0.12"),
    "Virtual Machines",
)
GCP = Profile(
    "gcp",
    {
        "train": "a2-highgpu-4g",
        "serve": "a2-highgpu-1g",
        "spot": "a2-highgpu-2g",
        "dark": "a2-ultragpu-1g",
        "unbilled": "a2-highgpu-1g",
        "mig": "a2-ultragpu-2g",
        "mps": "a2-highgpu-1g",
        "fractions": "a2-highgpu-2g",
        "second": "a2-highgpu-1g",
    },
    "us-central1",
    "01A2B3-C4D5E6-F70819",
    "example-ml",
    ("0A0B0C-1A1B1C-2A2B2C", "EUR"),
    Decimal("0.4"),
    "pd-balanced",
    Decimal("0.10"),
    "Compute Engine",
)
PROFILES = {profile.cloud: profile for profile in (AWS, AZURE, GCP)}
GCP_ZONE = "us-central1-a"
AZURE_GROUP = "ml-gpu"
"""Resource group, as people spell it; bills have it in lower case."""


@dataclass(frozen=True)
class Ids:
    """Spellings of one machine.

    Args:
        known: the id by which the ledger knows it.
        stated: what its agent says.
        billed: ResourceId in the bill.
        member: name of the scale-set member, beside a ResourceId that names the set.
    """

    known: str
    stated: str
    billed: str
    member: str | None = None


def aws_machine(token: Token, number: int, region: str, owner: str, *, is_arn: bool) -> Ids:
    """An EC2 instance; the bill gives the id or the ARN."""
    instance = "i-0" + token("machine", number, digits=16)
    return Ids(instance, instance, f"arn:aws:ec2:{region}:{owner}:instance/{instance}" if is_arn else instance)


def azure_machine(token: Token, number: int, subscription: str, *, in_set: bool, is_mixed: bool) -> Ids:
    """A virtual machine, or a member of a scale set: its bill names the set. Ids compare in lower case.

    Args:
        token: digits of a name.
        number: which machine of the fleet.
        subscription: `/subscriptions/<guid>`.
        in_set: the machine is a member of the scale set of all machines of the fleet.
        is_mixed: the bill spells the id as people do, not in lower case.
    """
    below = f"{subscription}/resourceGroups/{AZURE_GROUP}/providers/Microsoft.Compute"
    if not in_set:
        stated = f"{below}/virtualMachines/gpu-{token('machine', number, digits=6)}"
        return Ids(stated.lower(), stated, stated if is_mixed else stated.lower())
    name = f"gpu-{token('set', digits=6)}"
    pool = f"{below}/virtualMachineScaleSets/{name}"
    stated = f"{pool}/virtualMachines/{number}"
    return Ids(stated.lower(), stated, pool if is_mixed else pool.lower(), f"{name}_{number}")


def gcp_machine(token: Token, number: int, project: str) -> Ids:
    """A Compute Engine instance by its numeric id; agent and bill state the same."""
    numeric = str(int(token("machine", number, digits=15), 16) + 10**18)
    name = f"//compute.googleapis.com/projects/{project}/zones/{GCP_ZONE}/instances/{numeric}"
    return Ids(name, name, name)


def volume_ids(cloud: str, digits: str, sub_account: str) -> Ids:
    """A block volume: what the bill names, and what its host sees."""
    if cloud == "aws":
        return Ids("vol-0" + digits, "vol-0" + digits, "vol-0" + digits)
    if cloud == "gcp":
        name = f"//compute.googleapis.com/projects/{sub_account}/zones/{GCP_ZONE}/disks/scratch-{digits[:8]}"
        return Ids(name, name, name)
    stated = f"{sub_account}/resourceGroups/{AZURE_GROUP}/providers/Microsoft.Compute/disks/scratch-{digits[:8]}"
    return Ids(stated.lower(), stated, stated.lower())


def node_name(cloud: str, number: int, seed: int) -> str:
    """Host name of a machine."""
    if cloud == "aws":
        return f"ip-10-0-{number + 1}-{seed % 250 + 4}.ec2.internal"
    if cloud == "azure":
        return f"aks-gpu-{10_000_000 + seed % 80_000_000}-vmss{number:06}"
    return f"gke-ml-gpu-{seed % 100_000:05}-{number}.{GCP_ZONE}.c.example-ml.internal"
