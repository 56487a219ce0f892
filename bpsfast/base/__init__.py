"""Modules that every other package may use: settings, value formats, dtypes, logs, message framing, small services."""
