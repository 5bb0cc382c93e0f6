"""Scenarios on several processes, each compared with one process; see docs/distributed.md.

`harness` starts the processes; every other module defines scenarios.
"""
