"""Test that the receiver in the manual works, and that the figures in the manual are those of the code."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from cyborgweb.models.event_types import NotificationKind
from cyborgweb.notify import mail, owners, places, sender, webhook
from tests.cyborgweb.notify.conftest import Subscribe
from tests.cyborgweb.notify.receiver import Receiver

MANUAL_PAGE = (Path(__file__).resolve().parents[3] / "docs" / "notifications.md").read_text()


@pytest.mark.django_db
def test_the_receiver_in_the_manual_accepts_a_signed_message_once_and_rejects_others(
    subscribe: Subscribe, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "whsec_" + "A" * 43 + "="
    monkeypatch.setattr(webhook, "generate_secret", lambda: secret)
    world: dict[str, Any] = {}
    (code,) = re.findall(r"```python\n(.*?)```", MANUAL_PAGE, re.DOTALL)
    exec(code.replace("whsec_…", secret), world)
    hook = subscribe("webhook", target=receiver.url)
    hook.deliveries.create(kind="request.bound", data={"request": "r"}, event=1)
    sender.run()
    ((headers, body),) = receiver.accepted
    assert world["receive"](headers, body)["data"] == {"request": "r"}
    assert world["receive"](headers, body) is None
    for wrong in ({"webhook-id": "msg_2"}, {"webhook-timestamp": str(int(time.time()) - 301)}):
        with pytest.raises(ValueError, match="not signed"):
            world["receive"](headers | wrong, body)
    with pytest.raises(ValueError, match="not signed"):
        world["receive"](headers, body + b" ")


def test_the_figures_in_the_manual_equal_the_constants_of_the_code() -> None:
    units = {"s": 1, "min": 60, "h": 3600}
    (pauses_text,) = re.findall(r"After (5 s.*?);", MANUAL_PAGE, re.DOTALL)
    tries = tuple(int(number) * units[unit] for number, unit in re.findall(r"(\d+)\s+(s|min|h)\b", pauses_text))
    assert tries == sender.RETRY_DELAYS_S
    assert all(f"`{kind}`" in MANUAL_PAGE for kind in NotificationKind)
    assert (sender.MAX_WAIT_S, sender.PAUSE_AFTER_S, sender.RETENTION_S) == (3 * 86_400, 3 * 86_400, 30 * 86_400)
    assert (mail.CONNECT_TIMEOUT_S, mail.MAIL_TIMEOUT_S) == (10, 20)
    assert (sender.MAIL_SERVER_RETRY_S, sender.MAX_MAIL_SERVER_RETRY_S) == (30, 600)
    assert (sender.MAX_SERVER_FAULTS, sender.MAX_REFUSED_MAILS) == (3, 5)
    assert (
        places.MAX_WEBHOOKS_PER_HOST,
        places.MAX_WEBHOOKS_PER_PROJECT,
        places.MAX_WEBHOOKS,
        sender.SLOW_ATTEMPT_S,
        sender.MAX_MESSAGES_PER_MAIL,
        sender.MAIL_COLLECT_S,
    ) == (4, 8, 64, 2, 100, 15)
    assert (places.MAX_OF_SLOW, places.MAX_OF_SLOW_PER_HOST, places.FEW) == (16, 2, 2)
    assert (sender.SLOW_S, sender.MAX_SLOW_S) == (60, 3600)
    assert owners.CHECK_INTERVAL_S == 15 * 60
