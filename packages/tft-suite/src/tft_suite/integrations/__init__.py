"""Adapters that make the trainers of other libraries fault-tolerant.

Each module needs the library of the same name. `import tft_suite` imports none of them.

Law of this file: nothing, so that importing one adapter never imports another library.
"""
