"""Building blocks of console pages: lists, badges, export, permissions, timelines."""
