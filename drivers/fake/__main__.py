"""Run `python -m drivers.fake`: plug, unplug and break simulated hardware."""

from drivers.fake.cli import main

if __name__ == "__main__":
    main()
