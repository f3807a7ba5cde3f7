"""The benchmarks: one harness, one row schema. docs/benchmarks.md says how to run them and what a row means.

    make bench                                              # everything, on this machine
    pytest tests/benchmarks/test_speed.py --benchmark-enable --benchmark-only --grid main --rows rows.jsonl

Times are compared inside one run only, and asserted nowhere. A package, so that its modules find each other by relative
import under every pytest this project supports (8.3's importlib mode finds no siblings without this file).
"""
