"""Configuration: `keys` is the typed list of `CYBORG_…` keys, `base` and `worker` are Django's settings made of it."""
