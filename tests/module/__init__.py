"""Tests of ``ORTModule``, against the module itself."""
