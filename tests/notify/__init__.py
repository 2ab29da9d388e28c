"""Subscriptions, the fan-out of events, webhooks, mail, the inbox."""
