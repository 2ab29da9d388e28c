"""Configuration: `keys` is the typed list of `CYBORG_…` keys; `base` and `worker` make Django's settings from it."""
