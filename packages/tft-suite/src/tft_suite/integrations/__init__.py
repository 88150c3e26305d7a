"""Adapters that make the trainers of other libraries fault-tolerant.

Each module needs the library that it is named after; none of them is imported by `import tft_suite`.

Law of this file: nothing, so that importing one adapter never imports another library.
"""
