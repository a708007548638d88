"""What the whole package shares: errors, files, signals, sizes, masks, schedules. Needs no torch."""
