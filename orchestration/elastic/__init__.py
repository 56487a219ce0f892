"""Which workers train in an elastic job: who takes the place of a lost one, and who joins. See docs/design/elastic.md."""
