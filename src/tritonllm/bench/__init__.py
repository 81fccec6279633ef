"""Shapes and benchmarks."""
