"""The version of this package, for the package itself and for the modules that it imports."""

__version__ = "0.1.0"
