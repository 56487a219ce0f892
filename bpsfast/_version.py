"""The version of the package; everything below the top imports it from here."""
__version__ = "0.1.0"
