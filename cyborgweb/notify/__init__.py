"""Notifications: subscriptions, the messages that match them, and their delivery by webhook, mail or inbox.

`fanout` reads events and writes one delivery for each matching subscription. `sender` delivers them to webhooks and by
mail. `api` and `admin` let people manage their subscriptions.
"""
