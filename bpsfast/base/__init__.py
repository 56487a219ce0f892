"""What every other package may use: settings, dtypes, errors, logs, framing and small services without a better home."""
