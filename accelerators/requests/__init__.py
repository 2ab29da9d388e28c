"""Device profiles and accelerator requests: choose devices, bind them, count what is free."""
