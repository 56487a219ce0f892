"""What every other package may use: settings, value formats, dtypes, logs, framing, small services."""
