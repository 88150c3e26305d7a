"""Live state transfer between training processes: manifest and raw bytes, checked, without pickle."""

__version__ = "0.1.0"
