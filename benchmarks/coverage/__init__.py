"""Tests of the rotary functions of whole libraries."""
