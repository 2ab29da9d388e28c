"""Who wants to hear of what, and how they are told: subscriptions, messages, deliveries.

`fanout` reads the events and writes a delivery for each subscription that fits; `sender` brings them to their
destination. Called by the jobs of `cyborgweb.apps`, by the API (`notify.api`) and by the console (`notify.admin`).
"""
