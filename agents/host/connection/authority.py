"""Decide whether this host may write to Placement now, from what the gateway sent on the present connection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class PlacementAuthority:
    """Decides whether this host may write to Placement now.

    It may only while it has a connection whose gateway answers, and only for the highest writer epoch that it received
    on that connection. The event loop sets the state; the writing thread reads it through `find_refusal`.
    """

    epoch: int = -1
    is_gateway_answering: Callable[[], bool] = field(default=lambda: False)

    def on_connect(self, is_gateway_answering: Callable[[], bool]) -> None:
        """Start with a new connection: no writer epoch is known yet.

        `is_gateway_answering` returns whether the gateway has answered lately.
        """
        self.epoch, self.is_gateway_answering = -1, is_gateway_answering

    def on_disconnect(self) -> None:
        """Note that the connection is lost: nothing may be written until the next one."""
        self.on_connect(lambda: False)

    def on_writer_epoch(self, epoch: int) -> None:
        """Note a writer epoch from a Writer message or a command; an older one, which may arrive later, is ignored."""
        self.epoch = max(self.epoch, epoch)

    def find_refusal(self, epoch: int) -> str:
        """Return the reason why this host must not write for this writer epoch now, '' when it may."""
        if not self.is_gateway_answering():
            return "the connection to the conductor is lost, so another writer may have taken over"
        if epoch != self.epoch:
            return f"the command was made for writer epoch {epoch}, and the present writer epoch is {self.epoch}"
        return ""
