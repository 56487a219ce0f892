"""``python -m bpsfast``: the same as the command ``bpsfast``."""
from .cli import main

main()
