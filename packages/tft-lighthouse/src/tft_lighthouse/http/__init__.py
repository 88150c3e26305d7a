"""The lighthouse's HTTP port: status, metrics and health for operators, and the requests to drain or kill a replica.

aiohttp and prometheus_client are imported here only, so that a lighthouse without this port does not pay for them.

Law of this folder: HTTP. What there is to see and to ask for is in `tft_lighthouse.operations`.
"""
