"""What `cyborg-agent check` gathers about a host, as plain data; `gathering` fills it, and `checks` judges it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from drivers.inventory import DriverReport
from drivers.isolation.driver_main import Manifest

ConnectionProblem = Literal["", "name", "refused", "timeout", "unreachable", "certificate", "tls", "answer", "status"]
"""What went wrong on the way to the conductor: the name is unknown, nobody listens, no answer in time, another network
error, another certificate than the pinned one, another TLS error, no answer that a gateway gives, an HTTP error."""


@dataclass(frozen=True)
class SriovCard:
    """A PCI function that can have virtual functions: at most `total`, and `current` of them exist now."""

    address: str
    total: int
    current: int
    driver: str


@dataclass(frozen=True)
class KernelFacts:
    """What the kernel offers. `release` is that of uname, such as `6.1.0-18-amd64`.

    `missing_iommu` is the reason why there is no IOMMU group; '' if there are groups. `vfio_drivers` are those that the
    kernel has loaded; `can_load_vfio` tells whether the module vfio-pci is installed for this kernel. `modaliases` maps
    PCI functions to the kernel's names of their hardware, which a driver's `matches` select.
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
    """What the user that runs the check may do: the effective user id and capabilities, by their names."""

    uid: int
    capabilities: frozenset[str]
    sys_read_only: bool
    state_dir: str
    state_dir_problem: str
    """Why the state directory cannot be used; '' if it can, also if it does not exist yet and can be made."""


@dataclass(frozen=True)
class DriverFacts:
    """What one installed driver answered: its report, what it lacks on this host and its manifest."""

    report: DriverReport
    limitations: tuple[str, ...]
    enabled: bool
    manifest: Manifest

    @property
    def name(self) -> str:
        """Return the driver's name."""
        return self.report.driver


@dataclass(frozen=True)
class ConductorFacts:
    """What an attempt to reach the conductor gave. `address` is '' if neither a join token nor the journal names one.

    `problem` and `reason` say why it failed; both are '' if it answered. `date` is the answer's Date header; `before`
    and `after` are this host's clock around the request, in seconds since 1970.
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
    """Everything that the checks judge. `host_usage` maps PCI addresses that the host itself uses to reasons.

    `usage_error` says why this could not be found out. `known_host` is the host to which the state directory belongs,
    '' if it belongs to none yet.
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
