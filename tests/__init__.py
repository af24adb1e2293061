"""Tests of cachefs."""
