"""The facts about a host that `cyborg-agent check` judges, as plain data. `gathering` collects them, `checks` judges
them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from drivers.inventory import DriverReport
from drivers.isolation.driver_main import Manifest

ConnectionProblem = Literal["", "name", "refused", "timeout", "unreachable", "certificate", "tls", "answer", "status"]
"""Why the conductor could not be asked; '' if there was no problem.

`name`: the host name is unknown. `refused`: nothing listens on the port. `timeout`: no answer in time. `unreachable`:
another network error. `certificate`: the certificate is not the pinned one, or not valid. `tls`: another TLS error.
`answer`: what answered is not a gateway. `status`: the gateway answered with an HTTP error.
"""


@dataclass(frozen=True)
class SriovCard:
    """A PCI function that can have virtual functions.

    `total` is the maximum number of virtual functions, `current` the number that exist now. `driver` is the kernel
    driver of the card, '' if it has none.
    """

    address: str
    total: int
    current: int
    driver: str


@dataclass(frozen=True)
class KernelFacts:
    """Facts about the kernel: its release, IOMMU groups, VFIO drivers, SR-IOV cards and PCI functions.

    `release` is the kernel's release as `uname -r` prints it, such as `6.1.0-18-amd64`. `iommu_groups` is the number of
    IOMMU groups that have PCI functions; `missing_iommu` is the reason why there is none, '' if there are groups.
    `vfio_drivers` are the VFIO drivers that the kernel has loaded; `can_load_vfio` tells whether the module vfio-pci is
    installed for this kernel. `modaliases` maps the address of each PCI function to its modalias, the kernel's
    description of the hardware, with which the patterns in a driver's `matches` are compared.
    """

    release: str
    iommu_groups: int
    missing_iommu: str
    vfio_drivers: tuple[str, ...]
    can_load_vfio: bool
    sriov_cards: tuple[SriovCard, ...]
    modaliases: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RightsFacts:
    """Facts about the rights of the process that runs the check, and about the state directory.

    `uid` is the effective user id of the process. `capabilities` has those effective capabilities of the process that
    the checks look at. `sys_read_only` tells whether /sys is mounted read-only for the process.
    """

    uid: int
    capabilities: frozenset[str]
    sys_read_only: bool
    state_dir: str
    state_dir_problem: str
    """Why the state directory cannot be used; '' if it exists and can be used, or if it can be created."""


@dataclass(frozen=True)
class DriverFacts:
    """Facts about one installed driver.

    `report` is its report, after conflicts between enabled drivers were settled. `limitations` are the reasons why it
    cannot offer everything on this host. `enabled` tells whether it is in CYBORG_ENABLED_DRIVERS.
    """

    report: DriverReport
    limitations: tuple[str, ...]
    enabled: bool
    manifest: Manifest

    @property
    def name(self) -> str:
        """The driver's name."""
        return self.report.driver


@dataclass(frozen=True)
class ConductorFacts:
    """The result of an attempt to reach the conductor.

    `address` is '' if neither a join token nor the journal has an address; then nothing was tried. `fingerprint` is
    that of the conductor's certificate, or of the pinned one if the conductor did not answer; '' if none is pinned.
    `problem` and `reason` say why the attempt failed; both are '' if it did not fail. The other fields are empty or 0
    unless the conductor answered: `ip_address` is the address that answered, `date` the Date header of the answer (''
    if there is none), and `before` and `after` are this host's time before and after the request, in seconds since
    1970.
    """

    address: str = ""
    fingerprint: str = ""
    ip_address: str = ""
    problem: ConnectionProblem = ""
    reason: str = ""
    date: str = ""
    before: float = 0.0
    after: float = 0.0


@dataclass(frozen=True)
class HostFacts:
    """All facts that the checks judge.

    `host` is the host's name (the compute provider in Placement), and `node` its node name. `known_host` is the host to
    which the state directory belongs, '' if it belongs to none yet. `drivers` are all installed drivers, enabled or
    not. `host_usage` maps the address of each PCI function that the host itself uses, or of which this is unknown, to
    the reason. `usage_error` is the reason why this cannot be found out for any function, '' if it can.
    """

    host: str
    node: str
    known_host: str
    kernel: KernelFacts
    rights: RightsFacts
    conductor: ConductorFacts
    drivers: tuple[DriverFacts, ...] = ()
    host_usage: Mapping[str, str] = field(default_factory=dict)
    usage_error: str = ""
