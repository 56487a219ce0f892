"""The version of bpsfast, for its commands, daemons and reports; `bpsfast.__version__` is the same."""
__version__ = "0.1.0"
