"""What we tell OpenStack. Today it is told nothing: `provider` intents wait until the Placement client is here."""
