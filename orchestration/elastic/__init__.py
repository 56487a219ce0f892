"""Which workers train in an elastic job: who replaces a lost one, and who joins. See docs/design/elastic.md."""
