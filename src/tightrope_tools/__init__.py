"""Tools that look at other people's files and functions: audit, inspect, convert, detect.

The library `tightrope` never imports them. This file imports nothing, so that the command starts fast.
"""
